"""The testing kit: real servers as processes, faults, a workload and judges that count rows."""
