"""The throughput benchmark: what a step costs, what the machine can do, and the published rows to
compare with.
"""
