"""The chaos suite: real processes, real kills, and a judge that reads what they wrote down.

python -m chaos --help      docs/chaos.md tells the rest

journal    what is written down, by whom
content    the bytes of a version
worker     one process: a peer, a program, and what it can be told to do to itself
programs   what trainers, rollouts, keepers and elastic ones do all day
arena      the cluster of processes, and the hosts and links they live on
faults     what can be done to them
schedule   what is done when, from a seed
run        one run: start, disturb, calm down, end
judge      reads a journal in a process of its own; checks/ has what must hold
report     the table, the JSON, the timeline
"""
