"""The interface of a backend's store, and the entries and open states that all backends share."""
