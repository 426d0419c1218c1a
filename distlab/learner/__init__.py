"""The logic of the learner's commands: progress, checks, hints, diffs, resets, traces, watching.

course.toml, templates ──▶ folder, source          the course, and the learner's functions
                       ──▶ templates               the original templates, and resets
tests/test_phase1.py   ──▶ grading, grader_server  the verdict, from another process
.distlab/              ──▶ state                   progress by task, never trusted

The commands of ``distlab.cli`` are thin: they print what the functions here return. Nothing here
imports torch, except ``trace``.
"""
