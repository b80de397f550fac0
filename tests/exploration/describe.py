"""The texts of traces."""

from __future__ import annotations

from tests.exploration import calls, driver, servers, slot

from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints.decisions import Barrier, NotifyAbort
from onceflow.core.protocol.log.rules import CheckpointDecided
from onceflow.core.protocol.loops import attempt_facts


def describe(value: object) -> str:
    """Return the text of an event, a message or a request for traces."""
    match value:
        case attempt_facts.SlotMessageReceived(_, _, message):
            return describe(message)
        case attempt_facts.SlotGone(reason=reason):
            return f"its stream has ended ({reason})"
        case messages.Acked(checkpoint, snapshot):
            positions = [e.decode() for o in snapshot.operators for e in o.lists.get("splits", ())]
            listed = [str(c.transaction) for o in snapshot.operators for c in o.committables]
            return f"ack of checkpoint {checkpoint} at {', '.join(positions)}, lists {listed}"
        case messages.CommittedThrough(_, checkpoint):
            return f"committed through checkpoint {checkpoint}"
        case messages.Complete(checkpoint):
            return f"checkpoint {checkpoint} is decided"
        case Barrier(checkpoint):
            return f"barrier {checkpoint}"
        case NotifyAbort(checkpoint):
            return f"checkpoint {checkpoint} is aborted"
        case messages.Failed(error_class=name, message=text):
            return f"it has failed ({name}: {text})"
        case messages.GloballyCommitted(sink_id, checkpoint):
            return f"{sink_id} is committed through checkpoint {checkpoint}"
        case slot.TakeBarrier(rows):
            return f"reads {rows} rows and takes the barrier"
        case slot.EndInput():
            return "reads to the end of its input"
        case driver.RequestCheckpoint():
            return "is asked for a checkpoint"
        case driver.Wait():
            return "waits until something is due"
        case _:
            return _describe_request(value)


def _describe_request(value: object) -> str:
    match value:
        case calls.CopyState():
            return "copies the state of the savepoint"
        case calls.WriteMetadata():
            return "makes the savepoint whole"
        case calls.DeleteMetadata():
            return "deletes the savepoint"
        case calls.ReadMetadata():
            return "reads the savepoint"
        case calls.ListRecords():
            return "lists the log"
        case calls.ReadRecord(sequence):
            return f"reads record {sequence}"
        case calls.CreateRecord(sequence, data):
            record = servers.decode(data)
            if isinstance(record, CheckpointDecided):
                number = record.completed.checkpoint
                what = f"decision of checkpoint {number}"
            else:
                what = f"claim of attempt {record.attempt}"
            return f"appends {what} as record {sequence}"
        case calls.OpenTarget(sink, attempt):
            return f"opens {sink} for attempt {attempt}"
        case calls.ListInDoubt(sink):
            return f"lists what {sink} holds in doubt"
        case calls.ReadTarget(sink) | calls.ReadThrough(sink):
            return f"asks {sink} what is committed"
        case calls.CheckFence(sink):
            return f"reads the fence of {sink}"
        case calls.Prepare(transaction, rows):
            return f"prepares {transaction} with rows {list(rows)}"
        case calls.CommitTransaction(transaction) | calls.ApplyStaged(transaction):
            return f"commits {transaction}"
        case calls.ReadStaged(transaction):
            return f"reads the staged rows of {transaction}"
        case calls.HasProof(transaction):
            return f"looks for the proof of {transaction}"
        case calls.RollBack(transaction):
            return f"rolls back {transaction}"
        case calls.CommitVersion(sink, checkpoint):
            return f"commits checkpoint {checkpoint} of {sink} as a version"
        case _:
            return type(value).__name__
