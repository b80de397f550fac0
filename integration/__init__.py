"""The testing kit: real servers as processes, faults, a workload and an oracle that counts rows."""
