"""The job of `postgres_sink_job` with a MySQL sink in the place of the Postgres one. Killed, too.

python mysql_sink_job.py URL DIRECTORY ROWS KIND [POINT@CHECKPOINT]
"""

from __future__ import annotations

import sys

from tests.integration import postgres_sink_job

from onceflow.sinks import MySQLSink

if __name__ == "__main__":
    vars(postgres_sink_job)["PostgresSink"] = MySQLSink
    postgres_sink_job.main(sys.argv[1:])
