"""Where to cut a chain of layers into stages: what layers cost and hold on every stage, the exact partition, cuts that
balance lanes with several stages, and a local search by the order of the schedule.
"""
