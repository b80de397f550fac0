"""The benchmark Nexmark: 23 queries over persons, auctions and bids, each checked exactly."""
