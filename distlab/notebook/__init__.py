"""Cells on ranks: ``%load_ext distlab``, ``%cluster 8``, then ``%%ranks`` above a cell.

targets     which ranks: 0,2-3
cells       a cell's code
reloading   files that were edited since the last cell
names       completing the variables of a rank, and describing them
output      what a rank prints and shows
world       the ranks, simulated (simulated) or processes (engines)
processes   starting, finding and ending the processes, each under watched
engine      what runs in such a process; failing and idleness describe it
under_way   a cell on processes: interrupting, and noticing deaths; verdict reports
folding     ranks that show the same; values side by side
page        all of that as HTML and as text
live        the page while a cell runs
clusters    the ranks that %cluster begins
magics      the commands
shell       what the shell itself does for the ranks
"""
