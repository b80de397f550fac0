"""The clusters that run slots: Spark, Spark Connect, and processes of this machine."""
