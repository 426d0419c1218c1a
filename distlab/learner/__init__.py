"""What a learner's commands do: progress, checks, hints, diffs, resets, traces, watching.

course.toml, templates ──▶ folder, source          what there is
                       ──▶ templates, resetting    how it was, and is again
tests/test_phase1.py   ──▶ grading, grader_server  what it is worth, judged in another process
.distlab/              ──▶ state                   what was done; by task, never trusted

The commands of ``distlab.cli`` are thin: they print what the functions here return. Nothing here
imports torch, except ``trace`` and ``trace_bodies``.
"""
