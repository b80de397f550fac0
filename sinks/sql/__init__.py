"""What sinks into SQL databases share.

`sink` has what users see, `dialect` what a kind of server must give.
"""
