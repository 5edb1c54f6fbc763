-- The tables of a store. People read the views of the next migration.

create table quackmq.schema_version (
    version     integer primary key,
    migration   text not null,
    applied_at  timestamptz not null default clock_timestamp()
);
comment on table quackmq.schema_version is
    'Migrations that were applied. A broker refuses a version that is newer than its own.';

create table quackmq.store (
    only_row    boolean primary key default true check (only_row),
    cluster_id  text not null,
    created_at  timestamptz not null default clock_timestamp()
);
comment on table quackmq.store is 'One row: the identity of this store, which never changes.';

-- --- one active broker ------------------------------------------------------------------------

create table quackmq.owner (
    only_row     boolean primary key default true check (only_row),
    epoch        integer not null,
    owner_id     uuid not null,
    address      text not null,
    taken_at     timestamptz not null,
    released_at  timestamptz
);
comment on table quackmq.owner is
    'One row: the active broker. Each writing transaction first locks the row, if it still has the '
    'epoch of that broker. So a broker that was replaced cannot commit.';
comment on column quackmq.owner.epoch is 'Grows with each owner, and when an owner has to find out '
    'whether a transaction was committed.';
comment on column quackmq.owner.owner_id is 'A new id for each run of a broker.';
comment on column quackmq.owner.address is 'Where clients reach this broker.';
comment on column quackmq.owner.released_at is 'When the broker has ended in order; else null.';

create table quackmq.heartbeat (
    only_row   boolean primary key default true check (only_row),
    epoch      integer not null,
    beaten_at  timestamptz not null
) with (fillfactor = 10);
comment on table quackmq.heartbeat is
    'One row: when the active broker has last reported, by the clock of the database.';

create table quackmq.last_cycle (
    only_row      boolean primary key default true check (only_row),
    run_epoch     integer not null,
    cycle         bigint not null,
    committed_at  timestamptz not null
) with (fillfactor = 10);
comment on table quackmq.last_cycle is
    'One row: the last committed cycle. It tells whether a transaction of unknown outcome was '
    'committed, and whether the database has gone back in time.';
comment on column quackmq.last_cycle.run_epoch is 'The epoch with which the run of the broker began.';
comment on column quackmq.last_cycle.cycle is 'The number of the cycle within that run.';

-- --- topics and their records -----------------------------------------------------------------

create table quackmq.topic_settings (
    topic_id    uuid primary key,
    name        text collate "C" not null unique,
    partitions  integer not null,
    policy      jsonb not null,
    created_ms  bigint not null
);
comment on table quackmq.topic_settings is
    'Topics: name, number of partitions and policy. The view quackmq.topics has their sizes.';
comment on column quackmq.topic_settings.policy is 'The settings that differ from the default.';
comment on column quackmq.topic_settings.created_ms is 'Milliseconds since 1970, as in all columns '
    'that end in _ms.';

create table quackmq.partitions (
    topic_id               uuid not null,
    partition              integer not null,
    first_offset           bigint not null default 0,
    next_offset            bigint not null,
    first_position         bigint not null default 0,
    next_position          bigint not null,
    greatest_timestamp_ms  bigint not null,
    latest_append_ms       bigint not null,
    last_aborted_offset    bigint not null,
    removed_before         bigint not null default 0,
    is_deleted             boolean not null default false,
    primary key (topic_id, partition)
) with (fillfactor = 50);
comment on table quackmq.partitions is
    'Partitions that have or had records, or whose topic was deleted and has records to remove.';
comment on column quackmq.partitions.first_offset is 'The first offset that can be read.';
comment on column quackmq.partitions.next_offset is 'The offset of the next record.';
comment on column quackmq.partitions.first_position is 'The position of the first batch that can be '
    'read. The partition has next_position - first_position bytes.';
comment on column quackmq.partitions.next_position is 'The position of the next batch, in bytes.';
comment on column quackmq.partitions.greatest_timestamp_ms is 'The greatest timestamp of a record.';
comment on column quackmq.partitions.last_aborted_offset is 'The offset of the marker of the last '
    'aborted transaction; -1 if there is none.';
comment on column quackmq.partitions.removed_before is 'The rows before this offset are removed. '
    'Rows from here to first_offset are no longer read, and are removed in the background.';

create table quackmq.batches (
    topic_id               uuid not null,
    partition              integer not null,
    base_offset            bigint not null,
    next_offset            bigint not null,
    position               bigint not null,
    append_ms              bigint not null,
    max_timestamp_ms       bigint not null,
    greatest_timestamp_ms  bigint not null,
    checksum               bigint not null,
    data                   bytea not null,
    primary key (topic_id, partition, base_offset)
);
-- Batches come compressed, if their producer wants that: to try it again takes time for nothing.
alter table quackmq.batches alter column data set storage external;
create index batches_by_time on quackmq.batches using brin (append_ms) with (autosummarize = on);
comment on table quackmq.batches is
    'Record batches. A row has one or more whole batches of one partition, in the format of Kafka.';
comment on column quackmq.batches.base_offset is 'The offset of the first record in the row.';
comment on column quackmq.batches.next_offset is 'The offset after the last record in the row.';
comment on column quackmq.batches.position is 'The bytes of all earlier rows of the partition, '
    'including removed ones.';
comment on column quackmq.batches.append_ms is 'When the broker has appended the row.';
comment on column quackmq.batches.max_timestamp_ms is 'The greatest timestamp in this row.';
comment on column quackmq.batches.greatest_timestamp_ms is 'The greatest timestamp of the records '
    'in this row and in all earlier rows of the partition. So it never decreases.';
comment on column quackmq.batches.checksum is 'The CRC-32C of data.';

create table quackmq.producers (
    topic_id            uuid not null,
    partition           integer not null,
    producer_id         bigint not null,
    producer_epoch      integer not null,
    last_append_ms      bigint not null,
    transaction_offset  bigint not null,
    batches             jsonb not null,
    primary key (topic_id, partition, producer_id)
) with (fillfactor = 70);
comment on table quackmq.producers is
    'Idempotent producers in each partition, by which a repeated batch is recognised.';
comment on column quackmq.producers.transaction_offset is 'Where the open transaction of this '
    'producer begins; -1 if there is none.';
comment on column quackmq.producers.batches is 'The last batches, oldest first, each as [first '
    'sequence number, last sequence number, base offset, next offset, append time in ms].';

create table quackmq.aborted_transactions (
    topic_id      uuid not null,
    partition     integer not null,
    producer_id   bigint not null,
    first_offset  bigint not null,
    last_offset   bigint not null,
    primary key (topic_id, partition, last_offset)
);
comment on table quackmq.aborted_transactions is
    'Aborted transactions: their records are in the batches, and readers of committed records skip '
    'them.';
comment on column quackmq.aborted_transactions.last_offset is 'The offset of the marker.';

-- --- subscriptions and small state ------------------------------------------------------------

create table quackmq.cursors (
    name          text collate "C" not null,
    topic_id      uuid not null,
    partition     integer not null,
    next_offset   bigint not null,
    metadata      text not null,
    updated_ms    bigint not null,
    leader_epoch  integer not null,
    primary key (name, topic_id, partition)
) with (fillfactor = 70);
create index cursors_by_topic on quackmq.cursors (topic_id);
comment on table quackmq.cursors is
    'The next offset that a subscription or group wants of a partition. The view '
    'quackmq.subscriptions has the lag. In names and metadata, \0 is the character 0 and \\ a '
    'backslash.';

create table quackmq.states (
    key      text collate "C" primary key,
    value    bytea not null,
    version  bigint not null
) with (fillfactor = 70);
comment on table quackmq.states is
    'Small values of the broker, each changed by compare-and-set of its version. In keys, \0 is the '
    'character 0 and \\ a backslash.';
