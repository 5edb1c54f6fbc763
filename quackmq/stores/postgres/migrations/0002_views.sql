-- Views for people: what is stored, how fast it grows, and how far readers are behind.

create view quackmq.topics as
select
    topic.name,
    topic.partitions,
    coalesce(stored.records, 0)::bigint as records,
    coalesce(stored.bytes, 0)::bigint as bytes,
    round(coalesce(recent.records, 0) / 60.0, 1) as records_per_second,
    round(coalesce(recent.bytes, 0) / 60.0, 1) as bytes_per_second,
    to_timestamp(stored.latest_append_ms / 1000.0) as latest_append,
    to_timestamp(topic.created_ms / 1000.0) as created,
    topic.policy,
    topic.topic_id
from quackmq.topic_settings as topic
left join (
    select
        topic_id,
        sum(next_offset - first_offset) as records,
        sum(next_position - first_position) as bytes,
        nullif(max(latest_append_ms), 0) as latest_append_ms
    from quackmq.partitions
    group by topic_id
) as stored using (topic_id)
left join (
    select
        topic_id,
        sum(next_offset - base_offset) as records,
        sum(octet_length(data)) as bytes
    from quackmq.batches
    where append_ms > (extract(epoch from clock_timestamp() - interval '1 minute') * 1000)::bigint
    group by topic_id
) as recent using (topic_id);
comment on view quackmq.topics is
    'Topics with their records and bytes, and what was appended in the last minute, per second. '
    'Offsets without a record (markers of transactions) count as records.';

create view quackmq.subscriptions as
select
    cursor.name,
    topic.name as topic,
    cursor.partition,
    cursor.next_offset,
    greatest(
        partition.next_offset - greatest(cursor.next_offset, partition.first_offset), 0
    ) as lag,
    to_timestamp(cursor.updated_ms / 1000.0) as updated,
    cursor.metadata
from quackmq.cursors as cursor
join quackmq.topic_settings as topic using (topic_id)
left join quackmq.partitions as partition using (topic_id, partition);
comment on view quackmq.subscriptions is
    'Subscriptions and groups: the next offset that each wants of a partition, and its lag, the '
    'number of records behind that.';
