"""Cells on ranks: ``%load_ext distlab``, ``%cluster 8``, then ``%%ranks`` above a cell.

targets     which ranks: 0,2-3
cells       a cell's code
output      what a rank prints and shows
world       the ranks, simulated (simulated) or processes (engines)
folding     ranks that show the same; values side by side
page        all of that as HTML and as text
magics      the commands
"""
