/* The exactly-once protocol of onceflow in Promela, for the model checker SPIN.

   script/spec checks this model: it visits every order of steps and faults of a small world. Names in backquotes are those of the
   code, and a test requires that they exist. A world has one or two drivers, and for each attempt one or two slots. A slot has a
   split of the source and a sink subtask. At most FAULTS faults happen: a driver or a slot dies; a request to the decision log
   fails, arrives late, or its reply is lost; the reply of a target is lost; a checkpoint times out. Each process may stand still
   for any time. A driver that died is started again, and slots live on for a while after their driver.

   Left out: pruning of the log and of proofs, targets that are restored to older copies, whole checkpoints that the driver commits,
   batches of Spark, state files, and barriers that overtake rows. The simulator has them (docs/simulation.md).

   The mistakes below are plausible errors. script/spec requires that the checker finds a violation for each of them. */

#define ATTEMPTS (1 + DRIVERS + FAULTS)
#define CHECKPOINTS (PERIODIC + 1 + DRIVERS + FAULTS)
#define SUBTASK(a, p) ((a - 1) * SLOTS + p)
#define TRANSACTION(a, c, p) (((a - 1) * CHECKPOINTS + c - 1) * SLOTS + p)
#define TRANSACTIONS (ATTEMPTS * CHECKPOINTS * SLOTS)
#define attempt_of(t) (t / SLOTS / CHECKPOINTS + 1)
#define checkpoint_of(t) (t / SLOTS % CHECKPOINTS + 1)
#define subtask_of(t) (t % SLOTS)
#define LAST (SLOTS - 1)
#define ENDED (finished || refused || (STORAGES > 1 && is_over[0] && is_over[DRIVERS - 1]))
#define TARGET(p) (p * (TARGETS - 1))
#define ROW(p, r) (1 << (p * RECORDS + r - 1))
#define ROWS (SLOTS * RECORDS)
#define HAS(set, c) ((set >> (c - 1)) & 1)
#define WITH(set, c) (set | (1 << (c - 1)))
#define WITHOUT(set, c) (set & ~(1 << (c - 1)))
#define must(condition, text) if :: (condition) :: else -> printf(text); assert(false) fi
#define broken(name) (mistake == name)

#define OVERWRITES                      1   /* appends without create-if-absent */
#define TAKES_WHAT_EXISTS               2   /* takes the record of another driver for its own */
#define APPENDS_BEHIND_OTHERS           3   /* decides behind a claim that it has not read */
#define TAKES_UNKNOWN_FOR_DECIDED       4   /* takes a lost reply of the log for a decision */
#define CLAIMS_BACK                     5   /* claims again although another driver has claimed since */
#define TAKES_OLDER_ACKS                6   /* takes acks of older attempts */
#define MISSES_AN_ACK                   7   /* decides with an ack missing */
#define NOTIFIES_BEFORE_DECISION        8   /* tells sinks to commit before the decision is in the log */
#define FINISHES_AT_DECISION            9   /* finishes the job before its last commits */
#define NOTICES_NO_LOST_SLOT           10   /* waits for a dead slot */
#define RECOVERS_BEFORE_CLAIM          11   /* rolls back before it claims the log */
#define STARTS_FROM_NOTHING            12   /* starts without the last decision */
#define COMMITS_NOTHING                13   /* recovery commits nothing */
#define ABORTS_DECIDED                 14   /* recovery rolls back what is decided */
#define ABORTS_NOTHING                 15   /* recovery and sweep roll back nothing */
#define ABORTS_LIVE                    16   /* the sweep rolls back what the attempt itself has prepared */
#define SWEEPS_NOTHING                 17   /* looks only once for what older attempts have prepared */
#define COMMITS_AT_PRE_COMMIT          18   /* commits at the pre-commit */
#define ACKS_BEFORE_PREPARE            19   /* acks before the rows are durable */
#define COMMITS_WHAT_IS_PENDING        20   /* commits also what is not decided yet */
#define OMITS_ABORTED                  21   /* acks without what aborted checkpoints prepared */
#define OMITS_DECIDED                  22   /* acks without what is decided and not committed */
#define ROLLS_BACK_ABORTED             23   /* rolls back what an aborted checkpoint prepared */
#define CONFIRMS_UNCOMMITTED           24   /* confirms commits that it has not made */
#define WRITES_AGAIN_AFTER_LOST_REPLY  25   /* takes a lost reply of a commit for a failure, and writes the rows again */
#define POSITION_TOO_LATE              26   /* stores the position one record too late */
#define POSITION_TOO_EARLY             27   /* stores the position one record too early */
#define READS_BLOCKED_CHANNELS         28   /* reads rows behind a barrier before the barrier has come on all channels */
#define ASKS_NO_TARGET                 29   /* starts from a savepoint without asking targets what they have committed */
#define LISTS_NOTHING_OF_SAVEPOINT     30   /* starts from a savepoint without what sinks had prepared for it */
#define ASKS_BEFORE_IT_LISTS           31   /* asks targets what they have committed, and then lists what is in doubt */

mtype = { CLAIM, DECISION };                         /* `AttemptClaimed`, `CheckpointDecided` */
mtype = { PREPARED, COMMITTED };                     /* 0: never prepared, or rolled back */
mtype = { STANDS, LOST_RACE, REFUSED, UNKNOWN };     /* `AppendStands`, `AppendFenced`, `StorageError`, `DecisionUnknown` */

typedef Record {
  mtype kind;
  byte owner, attempt, checkpoint;
  byte position[2];                                  /* of each split: the records before the barrier */
  byte prepared_by, listed[2]                        /* `committables_of`: the attempt, and a set of checkpoints */
}
typedef Log { byte last; Record record[ATTEMPTS + CHECKPOINTS + 2] }

byte mistake, faults, starts;
bool finished, refused, is_over[DRIVERS], crash[DRIVERS];
Log log[STORAGES];
Record late;                                         /* a request to storage 0 that is still on its way */
byte late_sequence;
Record savepoint;                                    /* `Savepoint` */
byte savepoint_last;

byte fence[TARGETS];                                 /* the newest attempt that has claimed: `Ledger.claim` */
mtype state[TRANSACTIONS];                           /* in its target; COMMITTED is what the ledger proves */
byte rows[TRANSACTIONS];
byte visible[ROWS];                                  /* how often each row is in its target */
bool in_doubt[TRANSACTIONS];                         /* as a driver in other storage has listed it */
bool decided[STORAGES * TRANSACTIONS], must_go[TRANSACTIONS];   /* for the laws alone: no process reads them */

byte barrier[ATTEMPTS + 1], silent_from[ATTEMPTS + 1], complete[ATTEMPTS + 1];  /* `Barrier`, `Complete` */
byte aborted[ATTEMPTS + 1];                          /* `NotifyAbort`: only a broken slot heeds it */
byte left[ATTEMPTS + 1];
bool shutdown[ATTEMPTS + 1];                         /* `Shutdown`, or the driver is lost: `DriverLost` */
byte acked[ATTEMPTS * SLOTS], ack_position[ATTEMPTS * SLOTS], ack_listed[ATTEMPTS * SLOTS];  /* `Acked` */
byte through[ATTEMPTS * SLOTS];                      /* `CommittedThrough` */
bool exhausted[ATTEMPTS * SLOTS], gone[ATTEMPTS * SLOTS];  /* `SourceExhausted`, `SlotGone` */

byte i, j, k, x;                                     /* scratch: 0 between two steps */
#define wipe() i = 0; j = 0; k = 0; x = 0
#define each(index, from, to) index = from; do :: index < to ->
#define done(index) index++ :: else -> break od
#define DECIDED(s, t) decided[s * TRANSACTIONS + t]

/* --- laws: the words of docs/guarantee.md ----------------------------------------------------------------------------- */

inline check_decision(s, r) {
  must(log[s].last == 0 || r.attempt == log[s].record[log[s].last].attempt, "VIOLATED: an older attempt decides\n");
  each(i, 0, SLOTS)
    each(j, 1, CHECKPOINTS + 1)
      if :: HAS(r.listed[i], j) -> DECIDED(s, TRANSACTION(r.prepared_by, j, i)) = true :: else fi;
    done(j);
  done(i);
  each(x, 0, ROWS)
    k = visible[x];
    each(i, 0, SLOTS)
      each(j, 1, CHECKPOINTS + 1)
        if
        :: HAS(r.listed[i], j) && state[TRANSACTION(r.prepared_by, j, i)] == PREPARED ->
           k = k + ((rows[TRANSACTION(r.prepared_by, j, i)] >> x) & 1)
        :: else
        fi;
      done(j);
    done(i);
    must(r.prepared_by != r.attempt || k >= (x % RECORDS < r.position[x / RECORDS]), "VIOLATED: a decision loses a row: it is before the barrier, and neither visible nor listed\n");
    must(r.prepared_by != r.attempt || k <= (x % RECORDS < r.position[x / RECORDS]), "VIOLATED: a decision doubles a row: it is after the barrier, and visible or listed\n");
  done(x);
  wipe()
}

/* After recovery "its target is as the job was at that checkpoint". */
inline check_restored(start) {
  each(x, 0, ROWS)
    must(visible[x] >= (x % RECORDS < start.position[x / RECORDS]), "VIOLATED: something decided is lost: a slot starts behind a row that is not visible\n");
    must(visible[x] <= (x % RECORDS < start.position[x / RECORDS]), "VIOLATED: a row is visible, and will be read again\n");
  done(x);
  wipe()
}

inline check_finished() {
  each(x, 0, ROWS)
    must(visible[x] == 1, "VIOLATED: the job is finished, and a row is not in its target exactly once\n");
  done(x);
  each(x, 0, TRANSACTIONS)
    must(!must_go[x] || state[x] != PREPARED || log[storage].record[log[storage].last].attempt != a, "VIOLATED: a transaction of an older attempt stays prepared for ever\n");
  done(x);
  wipe()
}

/* --- the target -------------------------------------------------------------------------------------------------------- */

/* `Committer.commit`: a transaction that is gone is committed if its ledger row is there, and lost if not. */
inline commit(t) {
  d_step {
    if
    :: state[t] == PREPARED ->
       must(DECIDED(storage, t), "VIOLATED: something is visible that is not decided\n");
       state[t] = COMMITTED; DECIDED(storage, t) = false; must_go[t] = false;
       each(x, 0, ROWS)
         visible[x] = visible[x] + ((rows[t] >> x) & 1);
         must(visible[x] < 2, "VIOLATED: a row is in its target twice\n");
       done(x);
       rows[t] = 0; wipe()
    :: state[t] == COMMITTED                         /* `AlreadyCommitted` */
    :: else -> must(STORAGES > 1, "VIOLATED: something decided is lost: its transaction is gone\n")   /* `Lost` */
    fi
  }
}

/* `Committer.abort` */
inline roll_back(t) {
  d_step {
    must(!DECIDED(storage, t), "VIOLATED: something decided is rolled back\n");
    if :: state[t] == PREPARED -> state[t] = 0; rows[t] = 0; must_go[t] = false :: else -> refused = true fi
  }
}

/* --- the decision log -------------------------------------------------------------------------------------------------- */

inline create(s, r) {
  d_step {
    if :: r.kind == DECISION -> check_decision(s, r) :: else fi;
    if                                               /* nothing reads the positions of an earlier decision any more */
    :: r.kind == DECISION ->
       each(i, 1, log[s].last + 1)
         log[s].record[i].position[0] = 0; log[s].record[i].position[1] = 0; log[s].record[i].prepared_by = 0; log[s].record[i].listed[0] = 0; log[s].record[i].listed[1] = 0;
       done(i);
       i = 0
    :: else
    fi;
    log[s].last++;
    copy(log[s].record[log[s].last], r)
  }
}

inline copy(to, from) {
  to.kind = from.kind; to.owner = from.owner; to.attempt = from.attempt; to.checkpoint = from.checkpoint; to.prepared_by = from.prepared_by;
  to.position[0] = from.position[0]; to.position[1] = from.position[1];
  to.listed[0] = from.listed[0]; to.listed[1] = from.listed[1]
}

inline forget(r) {
  r.kind = 0; r.owner = 0; r.attempt = 0; r.checkpoint = 0; r.prepared_by = 0;
  r.position[0] = 0; r.position[1] = 0; r.listed[0] = 0; r.listed[1] = 0
}

/* `DecisionLog.put`: create the record whose number follows the view, only if that number is free. */
inline put() {
  if
  :: atomic { log[storage].last == last || broken(APPENDS_BEHIND_OTHERS) -> create(storage, draft); last = log[storage].last; reply = STANDS }
  :: atomic { log[storage].last > last && !broken(APPENDS_BEHIND_OTHERS) ->
       if
       :: broken(OVERWRITES) -> log[storage].last = last; create(storage, draft); last++; reply = STANDS
       :: broken(TAKES_WHAT_EXISTS) -> last++; reply = STANDS
       :: else -> reply = LOST_RACE
       fi }
  :: atomic { faults < FAULTS && log[storage].last == last -> faults++; printf("  the reply of the log is lost\n"); create(storage, draft); reply = UNKNOWN }
  :: atomic { faults < FAULTS && late_sequence == 0 && storage == 0 -> faults++; printf("  the request to the log is on its way\n"); copy(late, draft); late_sequence = last + 1; reply = UNKNOWN }
  :: atomic { faults < FAULTS -> faults++; printf("  the log refuses\n"); reply = REFUSED }
  fi
}

proctype Network() {
  do
  :: atomic { late_sequence && log[0].last + 1 == late_sequence && (STORAGES == 1 || log[STORAGES - 1].last == 0) -> printf("a late request creates record %d\n", late_sequence); create(0, late); forget(late); late_sequence = 0 }
  :: atomic { late_sequence && log[0].last >= late_sequence -> forget(late); late_sequence = 0 }
  :: ENDED -> break                                  /* or it never arrives; in storage that was left it would decide nothing */
  od
}

#ifdef EXCHANGE                                      /* every source has a channel to every sink subtask */
#define CHANNEL(a, from, to) ((a - 1) * SLOTS + from) * SLOTS + to
#define BARRIER 64
chan channel[ATTEMPTS * SLOTS * SLOTS] = [2] of { byte };

#endif

/* --- a slot: source and sink of one subtask, `SlotLoop` and `CommitQueue` ------------------------------------------------ */

#define T(c) TRANSACTION(a, c, p)
#define ME SUBTASK(a, p)
#define THROUGH(c) ((1 << (c)) - 1)
#define CAN_READ (position < RECORDS && !shutdown[a] && !finished && (silent_from[a] == 0 || seen < silent_from[a]))


/* `SinkWriter.pre_commit`, `CommitQueue.pre_committed` */
inline pre_commit() {
  d_step {
    if
    :: open ->
       state[T(seen)] = PREPARED; rows[T(seen)] = open; open = 0; pending = WITH(pending, seen);
       printf("slot %d of attempt %d prepares checkpoint %d\n", p, a, seen)
    :: else
    fi
  }
}

/* `Acked` lists what `CommitQueue.pending_through` returns. */
inline ack() {
  d_step {
    ack_position[ME] = marked; ack_listed[ME] = pending;
    if
    :: broken(OMITS_ABORTED) -> ack_listed[ME] = pending & WITH(0, seen)
    :: broken(OMITS_DECIDED) -> ack_listed[ME] = pending & ~THROUGH(complete[a])
    :: broken(POSITION_TOO_LATE) && marked < RECORDS -> ack_position[ME] = marked + 1
    :: broken(POSITION_TOO_EARLY) && marked > 0 -> ack_position[ME] = marked - 1
    :: broken(ACKS_BEFORE_PREPARE) && open -> ack_listed[ME] = WITH(pending, seen)
    :: else
    fi;
#ifndef EXCHANGE                                     /* there a later barrier may have left the source already */
    marked = 0;
#endif
    acked[ME] = seen;
    printf("slot %d of attempt %d acks checkpoint %d\n", p, a, seen)
  }
}

/* The barrier has come on all inputs (`BarrierAlignment`). `Ledger.record` reads the fence before the PREPARE. */
inline take_snapshot() {
  if
  :: open && fence[TARGET(p)] > a ->
     printf("slot %d of attempt %d is fenced\n", p, a); gone[ME] = !shutdown[a]; is_fenced = true
  :: open && fence[TARGET(p)] <= a -> phase = 1
  :: !open -> ack()
  fi
}

#ifdef EXCHANGE
/* `BarrierAlignment`: a channel whose barrier has come is not read until the barrier has come on all. */
inline receive() {
  channel[CHANNEL(a, q, p)] ? m;
  if
  :: m < BARRIER -> open = open | m
  :: else ->
     blocked[q] = m - BARRIER;
     if
     :: blocked[1 - q] == blocked[q] -> seen = blocked[q]; blocked[0] = 0; blocked[1] = 0; take_snapshot()
     :: blocked[1 - q] < blocked[q] -> blocked[1 - q] = 0     /* that barrier was skipped on this channel */
     :: blocked[1 - q] > blocked[q] -> blocked[q] = 0         /* this barrier was skipped on the other channel */
     fi
  fi;
  m = 0; q = 0
}
#endif

/* `CommitWorker`: the oldest decided transaction first. Then `CommittedThrough`, once no decided one is left. */
inline commit_first() {
  first = 1; do :: !HAS(pending, first) -> first++ :: else -> break od;
  printf("slot %d of attempt %d commits checkpoint %d\n", p, a, first);
  x = rows[T(first)];
  if :: broken(WRITES_AGAIN_AFTER_LOST_REPLY) && faults < FAULTS -> faults++; open = open | x :: else fi;
  x = 0;
  commit(T(first));
  if
  :: pending = WITHOUT(pending, first)
  :: faults < FAULTS -> faults++; printf("  the reply of the target is lost\n")      /* `Unknown`: asked again */
  fi;
  first = 0; confirm()
}

inline confirm() {
  if :: !(pending & THROUGH(complete[a])) || broken(CONFIRMS_UNCOMMITTED) -> through[ME] = complete[a] :: else fi
}

/* What nothing reads any more is 0, so that the checker sees one state where only the past differs. */
inline leave() {
  ack_position[ME] = 0; ack_listed[ME] = 0; acked[ME] = 0; through[ME] = 0; exhausted[ME] = false;
  position = 0; seen = 0; open = 0; pending = 0; phase = 0; marked = 0; is_fenced = false;
  left[a]++; clear_attempt(a)
}

inline clear_attempt(a) {
  if
  :: left[a] == SLOTS && shutdown[a] -> barrier[a] = 0; silent_from[a] = 0; complete[a] = 0; aborted[a] = 0
  :: else
  fi
}

proctype Slot(byte storage, a, p, position) {
  byte seen = complete[a], open, pending, first, phase, marked;
  bool is_fenced;
#ifdef EXCHANGE
  byte sent = complete[a], q, m, blocked[SLOTS];
#endif
  do
#ifndef EXCHANGE
  :: atomic { CAN_READ && phase == 0 ->
       position++; open = open | ROW(p, position); exhausted[ME] = position == RECORDS;
       printf("slot %d of attempt %d reads row %d\n", p, a, position) }
  :: atomic { barrier[a] > seen && phase == 0 && !finished -> seen = barrier[a]; marked = position; take_snapshot() }
#else
  :: atomic { CAN_READ && nfull(channel[CHANNEL(a, p, (p + position) % SLOTS)]) ->
       position++; channel[CHANNEL(a, p, (p + position + 1) % SLOTS)] ! ROW(p, position); exhausted[ME] = position == RECORDS;
       printf("source %d of attempt %d reads row %d\n", p, a, position) }
  :: atomic { barrier[a] > sent && nfull(channel[CHANNEL(a, p, 0)]) && nfull(channel[CHANNEL(a, p, 1)]) ->
       sent = barrier[a]; marked = position; channel[CHANNEL(a, p, 0)] ! BARRIER + sent; channel[CHANNEL(a, p, 1)] ! BARRIER + sent;
       printf("source %d of attempt %d emits barrier %d\n", p, a, sent) }
  :: atomic { phase == 0 && (!blocked[0] || broken(READS_BLOCKED_CHANNELS)) && nempty(channel[CHANNEL(a, 0, p)]) -> q = 0; receive() }
  :: atomic { phase == 0 && (!blocked[1] || broken(READS_BLOCKED_CHANNELS)) && nempty(channel[CHANNEL(a, 1, p)]) -> q = 1; receive() }
#endif
  :: atomic { phase == 1 && !finished ->
       if
       :: !broken(ACKS_BEFORE_PREPARE) -> phase = 0; pre_commit(); ack()
       :: else -> phase = 2; ack()
       fi;
       if :: broken(COMMITS_AT_PRE_COMMIT) && HAS(pending, seen) -> commit(T(seen)) :: else fi }
  :: atomic { phase == 2 -> phase = 0; pre_commit() }
  :: atomic { (pending & THROUGH(complete[a])) || (broken(COMMITS_WHAT_IS_PENDING) && through[ME] < complete[a] && pending) -> commit_first() }
  :: atomic { through[ME] < complete[a] && (!(pending & THROUGH(complete[a])) || broken(CONFIRMS_UNCOMMITTED)) -> confirm() }
  :: atomic { broken(ROLLS_BACK_ABORTED) && aborted[a] > complete[a] && HAS(pending, aborted[a]) ->
       pending = WITHOUT(pending, aborted[a]); roll_back(T(aborted[a])) }
  :: atomic { faults < FAULTS && !shutdown[a] -> faults++; gone[ME] = true; printf("slot %d of attempt %d dies\n", p, a); leave(); break }
  :: atomic { shutdown[a] || is_fenced || finished -> printf("slot %d of attempt %d leaves\n", p, a); leave(); break }    /* `ExitHard`, `EndSlot`: some time later */
  od
}

/* --- the driver: `RestartLoop`, `AttemptStarter`, `AttemptLoop` --------------------------------------------------------- */

/* Read the log and note its last decision: `DecisionLog.read`, `rules.replay`. */
inline read_log() {
  d_step {
    last = log[storage].last; base = last;
    do :: base && log[storage].record[base].kind != DECISION -> base-- :: else -> break od
  }
}

/* `plan_commits`, `judge_transaction`: the next transaction in doubt that an attempt before this one left UNDECIDED. */
inline find_undecided() {
  d_step {
    t = 0;
    do
    :: t < TRANSACTIONS ->
       k = 0;                                        /* LISTED, or `LogMemory.coverage`: the attempt decided it */
       each(i, 1, last + 1)
         if
         :: log[storage].record[i].kind == DECISION && log[storage].record[i].attempt == attempt_of(t) && log[storage].record[i].checkpoint >= checkpoint_of(t) -> k = 1
         :: log[storage].record[i].kind == DECISION && log[storage].record[i].prepared_by == attempt_of(t) && HAS(log[storage].record[i].listed[subtask_of(t)], checkpoint_of(t)) -> k = 1
         :: else
         fi;
       done(i);
       if
       :: state[t] == PREPARED && (attempt_of(t) < before || broken(ABORTS_LIVE)) && (!k || broken(ABORTS_DECIDED)) -> break
       :: else -> t++
       fi
    :: else -> break
    od;
    wipe()
  }
}

/* In other storage, a commit that the savepoint does not know: `unknown_commits`, `check_targets`, `require_not_behind`. */
inline find_unknown_commit() {
  d_step {
    t = 0;
    do
    :: t < TRANSACTIONS ->
       k = attempt_of(t) == savepoint.attempt;       /* `ends_emission`: it has read no row since */
       each(i, 1, savepoint_last + 1)
         if
         :: log[0].record[i].kind == DECISION && log[0].record[i].attempt == attempt_of(t) && log[0].record[i].checkpoint >= checkpoint_of(t) -> k = 1
         :: else
         fi;
       done(i);
       each(i, 1, last + 1)
         if
         :: log[STORAGES - 1].record[i].kind == DECISION && log[STORAGES - 1].record[i].attempt == attempt_of(t) && log[STORAGES - 1].record[i].checkpoint >= checkpoint_of(t) -> k = 1
         :: else
         fi;
       done(i);
       if :: state[t] == COMMITTED && !k -> break :: else -> t++ fi
    :: else -> break
    od;
    wipe()
  }
}

#define ACKED(p) (acked[SUBTASK(a, p)] == n)
#define ACKED_BEFORE(p) (broken(TAKES_OLDER_ACKS) && a > 1 && acked[SUBTASK(a - 1, p)] == n)
#define REQUEST(k, c) draft.kind = k; draft.owner = owner; draft.attempt = a; draft.checkpoint = c; draft.prepared_by = 0; draft.position[0] = 0; draft.position[1] = 0; draft.listed[0] = 0; draft.listed[1] = 0

inline take_ack(p) {
  draft.position[p] = (ACKED(p) || !ACKED_BEFORE(p) -> ack_position[SUBTASK(a, p)] : ack_position[SUBTASK(a - 1, p)]);
  draft.listed[p] = ack_listed[SUBTASK(a, p)]
}

/* `SinkRecovery`: roll back what attempts before this one have left undecided. */
inline roll_back_undecided() {
  do
  :: atomic { find_undecided();
       if
       :: t < TRANSACTIONS -> printf("driver %d rolls back checkpoint %d of slot %d of attempt %d\n", d, checkpoint_of(t), subtask_of(t), attempt_of(t)); roll_back(t)
       :: else -> t = 0; break
       fi }
  od
}

inline commit_listed() {
  do
  :: atomic {
       d_step { t = 0;
         do
         :: t < TRANSACTIONS && !(attempt_of(t) == log[storage].record[base].prepared_by && HAS(log[storage].record[base].listed[subtask_of(t)], checkpoint_of(t)) && state[t] != COMMITTED) -> t++
         :: else -> break
         od };
       if
       :: t < TRANSACTIONS && STORAGES > 1 && state[t] == 0 -> printf("driver %d stops: PreparedTransactionLost\n", d); refused = true; goto over
       :: t < TRANSACTIONS && !broken(COMMITS_NOTHING) -> printf("driver %d commits checkpoint %d of slot %d of attempt %d\n", d, checkpoint_of(t), subtask_of(t), attempt_of(t)); commit(t)
       :: else -> t = 0; break
       fi }
  od
}

proctype Driver(byte d) {
  byte storage, owner, a, before, last, base, n, t;
  Record draft;
  mtype reply;
  bool collecting, is_final, is_decided, is_savepoint, is_stopping, sweeping;
  atomic {
    storage = d * (STORAGES - 1);
    if
    :: d == 0 || (STORAGES == 1 && log[0].last)      /* drivers are alike: the one that claims first is driver 0 */
    :: d == 1 && STORAGES > 1 && is_over[0] && savepoint.kind == DECISION    /* the user starts it in other storage */
    :: d == 1 && (finished || (STORAGES > 1 && is_over[0] && savepoint.kind != DECISION)) -> goto over
    fi
  };
start:
  {
    atomic { starts++; owner = starts; a = 0; printf("driver %d starts\n", d) };
next_attempt:                                        /* `RestartLoop`: the slots of the attempt before are told to leave */
    atomic {
      if :: a -> shutdown[a] = true; gone[SUBTASK(a, 0)] = false; gone[SUBTASK(a, LAST)] = false; clear_attempt(a) :: else fi;
      collecting = false; is_final = false; is_decided = false; is_savepoint = false; is_stopping = false; sweeping = false; n = 0; t = 0; reply = 0
    };
    do                                               /* `LogOwner.claim`: `next_claim`, later `claim_again` */
    :: atomic {
         read_log();
         if
         :: a && log[storage].record[last].owner != owner && !broken(CLAIMS_BACK) -> printf("driver %d is fenced, and stops\n", d); goto over
         :: else
         fi;
         before = (last -> log[storage].record[last].attempt : (storage -> log[0].record[log[0].last].attempt : 0)) + 1;    /* in other storage: `seed_view`, `claim_above` */
         must(before <= ATTEMPTS, "VIOLATED: drivers take the job from each other without end\n");
         printf("driver %d reads the log up to record %d, to claim attempt %d\n", d, last, before)
       };
       if :: broken(RECOVERS_BEFORE_CLAIM) && base -> roll_back_undecided() :: else fi;
       atomic {
         REQUEST(CLAIM, 0); draft.attempt = before;
         put(); forget(draft);
         if :: reply == STANDS -> printf("driver %d has claimed attempt %d\n", d, before); a = before; break :: else fi
       }
    od;
    atomic {
      reply = 0;
      if                                             /* `LogOwner.find_restore_point` */
      :: base && !broken(STARTS_FROM_NOTHING) -> goto recover
      :: else -> skip
      fi;
      if :: storage == 1 -> find_unknown_commit() :: else -> t = TRANSACTIONS fi;          /* `check_targets` */
      if
      :: t < TRANSACTIONS && !broken(ASKS_NO_TARGET) -> printf("driver %d stops: SavepointRefused\n", d); refused = true; goto over
      :: else -> t = 0
      fi
    };
    atomic {
      REQUEST(DECISION, 0);                          /* `genesis_of`, or `build_first_decision` */
      if
      :: storage == 1 -> copy(draft, savepoint); draft.owner = owner; draft.attempt = a; draft.checkpoint = savepoint.checkpoint + 1;
         if :: broken(LISTS_NOTHING_OF_SAVEPOINT) -> draft.listed[0] = 0; draft.listed[1] = 0 :: else fi
      :: else
      fi;
      put(); forget(draft);
      if
      :: reply == STANDS -> base = last; reply = 0; printf("driver %d decides where the job begins\n", d)
      :: else -> goto next_attempt
      fi
    };
recover:
    atomic { if :: fence[0] < a -> fence[0] = a :: else -> goto next_attempt fi;           /* `SinkRecovery.open` */
             if :: TARGETS == 1 -> goto opened :: else fi };
    atomic { if :: fence[TARGETS - 1] < a -> fence[TARGETS - 1] = a :: else -> goto next_attempt fi };
opened:
    atomic {                                         /* `SinkRecovery.recover`: list, then ask (`require_not_behind`) */
      if
      :: storage == 1 && !broken(ASKS_BEFORE_IT_LISTS) ->
         each(i, 0, TRANSACTIONS) in_doubt[i] = state[i] == PREPARED; done(i);
         wipe()
      :: else
      fi
    };
    atomic {
      if :: storage == 1 -> find_unknown_commit() :: else -> t = TRANSACTIONS fi;
      if
      :: t < TRANSACTIONS && !broken(ASKS_NO_TARGET) -> printf("driver %d stops: StorageBehind\n", d); refused = true; goto over
      :: else -> t = 0
      fi
    };
    if :: broken(ABORTS_DECIDED) -> roll_back_undecided() :: else fi;
    commit_listed();
    if :: !broken(ABORTS_NOTHING) && !broken(RECOVERS_BEFORE_CLAIM) -> roll_back_undecided() :: else fi;
    atomic {                                         /* `Deploy` */
      if                                             /* the roll-back of such a transaction fails: `CommitFailed` */
      :: storage == 1 -> find_unknown_commit()
      :: else -> t = TRANSACTIONS
      fi;
      if
      :: t < TRANSACTIONS && in_doubt[t] -> printf("driver %d stops: CommitFailed\n", d); refused = true; goto over
      :: else -> t = 0
      fi;
      d_step {
        if :: log[storage].record[log[storage].last].attempt == a -> check_restored(log[storage].record[base]) :: else fi;
        n = log[storage].record[base].checkpoint; barrier[a] = n; complete[a] = n;
        each(i, 0, SLOTS)
          acked[SUBTASK(a, i)] = n; through[SUBTASK(a, i)] = n; exhausted[SUBTASK(a, i)] = log[storage].record[base].position[i] == RECORDS;
        done(i);
        wipe()
      };
      printf("driver %d starts the slots of attempt %d from checkpoint %d\n", d, a, n);
      run Slot(storage, a, 0, log[storage].record[base].position[0]);
      if :: SLOTS > 1 -> run Slot(storage, a, LAST, log[storage].record[base].position[LAST]) :: else fi
    };
    do                                               /* `CheckpointCoordinator` */
    :: atomic { !collecting && !is_final && !is_stopping && exhausted[SUBTASK(a, 0)] && exhausted[SUBTASK(a, LAST)] ->
         n++; barrier[a] = n; collecting = true; is_final = true; printf("driver %d triggers the final checkpoint %d\n", d, n) }
    :: atomic { !collecting && !is_final && !is_stopping && n < PERIODIC && !(exhausted[SUBTASK(a, 0)] && exhausted[SUBTASK(a, LAST)]) ->
         n++; barrier[a] = n; collecting = true; printf("driver %d triggers checkpoint %d\n", d, n) }
    :: atomic { STORAGES > 1 && storage == 0 && !collecting && !is_final && !is_stopping && n <= PERIODIC && savepoint.kind != DECISION ->
         n++; silent_from[a] = n; barrier[a] = n; collecting = true; is_savepoint = true; printf("driver %d triggers savepoint %d, to stop with it\n", d, n) }
    :: atomic { is_stopping && !collecting && !is_final ->
         n++; barrier[a] = n; collecting = true; is_final = true; printf("driver %d triggers the last checkpoint %d\n", d, n) }
    :: atomic { is_savepoint && ACKED(0) && ACKED(LAST) ->                    /* `WriteSavepoint` */
         REQUEST(DECISION, n); draft.prepared_by = a; take_ack(0); take_ack(LAST);
         d_step { copy(savepoint, draft); forget(draft); savepoint_last = last };
         collecting = false; is_savepoint = false; is_stopping = true; printf("driver %d writes savepoint %d\n", d, n) }
    :: atomic { broken(NOTIFIES_BEFORE_DECISION) && collecting && !is_savepoint && ACKED(0) && ACKED(LAST) && complete[a] < n -> complete[a] = n }
    :: atomic { collecting && !is_savepoint && (ACKED(0) || ACKED_BEFORE(0)) && (ACKED(LAST) || ACKED_BEFORE(LAST) || broken(MISSES_AN_ACK)) ->
         REQUEST(DECISION, n); draft.prepared_by = a; take_ack(0); take_ack(LAST);
         put(); forget(draft);                       /* `AppendDecision` */
         if
         :: reply == STANDS || (reply == UNKNOWN && broken(TAKES_UNKNOWN_FOR_DECIDED)) ->  /* `NotifyComplete` */
            printf("driver %d has decided checkpoint %d of attempt %d\n", d, n, a);
            collecting = false; complete[a] = n; base = last; is_decided = is_final;
            sweeping = !broken(SWEEPS_NOTHING) && !broken(ABORTS_NOTHING);
            d_step {
              each(i, 0, TRANSACTIONS)
                if :: state[i] == PREPARED && attempt_of(i) < a && !DECIDED(storage, i) && STORAGES == 1 -> must_go[i] = true :: else fi;
              done(i);
              wipe()
            }
         :: reply == REFUSED -> collecting = false; is_final = false; aborted[a] = n; printf("driver %d aborts checkpoint %d\n", d, n)
         :: reply == LOST_RACE || (reply == UNKNOWN && !broken(TAKES_UNKNOWN_FOR_DECIDED)) -> goto next_attempt
         fi;
         reply = 0 }
    :: atomic { collecting && !is_savepoint && faults < FAULTS ->
         faults++; collecting = false; is_final = false; aborted[a] = n; printf("driver %d aborts checkpoint %d, which timed out\n", d, n) }
    :: atomic { sweeping -> find_undecided();        /* `SinkRecovery.sweep` */
         if
         :: t < TRANSACTIONS -> printf("driver %d sweeps checkpoint %d of slot %d of attempt %d\n", d, checkpoint_of(t), subtask_of(t), attempt_of(t)); roll_back(t)
         :: else -> sweeping = false
         fi;
         t = 0 }
    :: (gone[SUBTASK(a, 0)] || gone[SUBTASK(a, LAST)]) && !broken(NOTICES_NO_LOST_SLOT) -> goto next_attempt    /* `SlotLost` */
    :: atomic { is_decided && !sweeping && ((through[SUBTASK(a, 0)] >= n && through[SUBTASK(a, LAST)] >= n) || broken(FINISHES_AT_DECISION)) ->
         printf("driver %d finishes the job\n", d);     /* `FinishJob` */
         if :: is_stopping :: else -> d_step { check_finished() }; finished = true fi;
         break }
    od
  } unless { if :: atomic { finished -> goto over } :: atomic { crash[d] -> crash[d] = false; printf("driver %d dies\n", d);
               if :: a -> shutdown[a] = true; clear_attempt(a) :: else fi } fi;
             if :: STORAGES > 1 && d == 0 -> goto over :: else -> goto start fi };
over:
  atomic {
    if :: a -> shutdown[a] = true; clear_attempt(a) :: else fi;
    is_over[d] = true; owner = 0; a = 0; before = 0; last = 0; base = 0; n = 0; t = 0; reply = 0; forget(draft);
    collecting = false; is_final = false; is_decided = false; is_savepoint = false; is_stopping = false; sweeping = false
  }
}

/* The deaths of drivers. Without a fault left the process waits for the end of the job: if that never comes, it is a deadlock. */
proctype Killer() {
  do
  :: atomic { faults < FAULTS && !is_over[0] -> faults++; crash[0] = true }
  :: atomic { faults < FAULTS && DRIVERS > 1 && !is_over[1] -> faults++; crash[1] = true }
  :: ENDED -> break
  od
}

init {
  atomic {
    c_code { if (getenv("MISTAKE")) now.mistake = atoi(getenv("MISTAKE")); };
    run Driver(0); run Killer(); run Network();
    if :: DRIVERS > 1 -> run Driver(1) :: else fi
  }
}

#ifdef PROGRESS
ltl ends { <> finished }
#endif
