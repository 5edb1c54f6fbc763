"""The line protocol: every cell of its table, the same events however the bytes come, bounds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quackmq import limits
from quackmq.errors import ProtocolError, QuackError, RecordTooLarge
from quackmq.protocols.line import limits as line_limits
from quackmq.protocols.line.codec import conversation as line
from quackmq.protocols.line.codec.conversation import (
    TABLE,
    Conversation,
    Kind,
    Refused,
    State,
    Step,
    kind_of,
)
from quackmq.protocols.line.codec.messages import (
    Choose,
    Connect,
    Entry,
    Message,
    Role,
    Word,
    encode,
    parse,
)
from quackmq.protocols.line.codec.polling import GetEntry, NoEntry
from tests.kit.tables import each
from tests.protocols.codecs.line_messages import (
    CALM,
    HELLO,
    NEWS,
    WAYS,
    contents,
    first_answer,
    in_state,
    lines_of,
    messages,
    names,
    topics,
)

# --- the table ------------------------------------------------------------------------------

#: One of each kind, and of answers all that a peer might send back.
KINDS: list[Message] = [
    *(Connect(role, "7") for role in Role),
    *(Choose(role, "7", "1") for role in Role),
    NEWS,
    GetEntry("1", 0),
    NoEntry("1", 0),
    *Word,
]
CELLS = list(itertools.product(State, KINDS))


def test_the_drawn_table_is_the_real_one() -> None:
    drawn = [
        re.split(r"  +", row.strip())
        for row in (line.__doc__ or "").split("---\n", 1)[1].split("\n\n", 1)[0].splitlines()
    ]
    real = [
        [state, kind, ", ".join(step.answers) or "-", step.next_state]
        for state, steps in TABLE.items()
        for kind, step in steps.items()
    ]
    assert sorted(drawn) == sorted(real)


def test_every_state_and_every_kind_is_met_here() -> None:
    assert set(TABLE) == set(State) == set(WAYS)
    assert {kind_of(message) for message in KINDS} == set(Kind)


@each(("state", "message"), CELLS)
def test_a_message_does_in_a_state_what_its_cell_says(state: State, message: Message) -> None:
    step = TABLE[state].get(kind_of(message))
    for answer in step.answers if step else [None]:
        conversation = in_state(state)
        before = conversation.peer, conversation.topics
        conversation.receive(encode(message))
        if state is State.NEW and step is None:
            with pytest.raises(ProtocolError, match="begin with pub ID connect"):
                conversation.next_event()
            assert conversation.state is State.OVER
            continue
        event = conversation.next_event()
        if state is State.OVER:
            assert event is None and not conversation.has_pending_bytes
        elif step is None:
            assert isinstance(event, Refused) and "out of order" in str(event.error)
            assert not conversation.owes_answer
        else:
            assert event == message
            assert conversation.owes_answer == bool(step.answers)
        if step is None:
            assert (conversation.peer, conversation.topics) == before
        if answer is not None:
            assert conversation.state is state
            assert conversation.answer(answer) == encode(answer)
        goes_on = step is not None and (not step.answers or answer is step.answers[0])
        assert conversation.state is (step.next_state if step and goes_on else state)
        assert not conversation.owes_answer


@each("state", [state for state in State if state is not State.OVER])
def test_the_broker_may_end_a_conversation_at_any_time(state: State) -> None:
    conversation = in_state(state)
    conversation.receive(b"half a li")
    assert conversation.answer(Word.TERMINATE) == b"terminate\n"
    conversation.receive(b"ne\nterminate\n")
    assert conversation.state is State.OVER
    assert conversation.next_event() is None and conversation.unread_bytes == 0


# --- what the table does not tell -----------------------------------------------------------


def test_the_record_of_a_connection_has_what_was_accepted_and_nothing_else() -> None:
    conversation = Conversation()
    said: list[tuple[Message, Word]] = [
        (Connect(Role.SUB, "taken"), Word.REJECT),
        (Connect(Role.SUB, "7"), Word.ACCEPT),
        (Word.END, Word.ACCEPT),
        (Choose(Role.SUB, "7", "2"), Word.ACCEPT),
        (Choose(Role.SUB, "7", "secret"), Word.REJECT),
        (Choose(Role.SUB, "7", "1"), Word.ACCEPT),
        (Choose(Role.SUB, "7", "2"), Word.ACCEPT),
        (Word.END, Word.ACCEPT),
    ]
    for message, answer in said:
        conversation.receive(encode(message))
        assert conversation.next_event() == message
        conversation.answer(answer)
    assert conversation.peer == Connect(Role.SUB, "7")
    assert conversation.topics == ("2", "1")


@pytest.mark.parametrize(
    ("state", "text", "said"),
    [
        (State.PUB_CHOOSING, b"pub 8 topic 1", "this connection is that of 7, not of 8"),
        (State.SUB_CHOOSING, b"sub 77 topic 1", "this connection is that of 7, not of 77"),
        (State.PUBLISHING, b"topic 2 [quack]", "topic 2 was not announced"),
        (State.SUB_CHOOSING, b"successful", "expected sub ID topic K or end or terminate"),
        (State.PUBLISHING, b"topic 1 [" + b"q" * 17 + b"]", "17 bytes; the limit is 16"),
        (State.PUBLISHING, b"q" * 1_057, "a line of 1057 bytes; the limit is 1056"),
    ],
)
def test_other_ids_and_topics_and_what_is_too_long_are_refused(
    state: State, text: bytes, said: str
) -> None:
    conversation = in_state(state, entry_bytes=16)
    conversation.receive(text + b"\nterminate\n")
    event = conversation.next_event()
    assert isinstance(event, Refused) and said in str(event.error)
    assert conversation.state is state
    assert conversation.next_event() is Word.TERMINATE


def test_a_connection_has_so_many_topics_and_may_repeat_them() -> None:
    conversation = in_state(State.PUB_CHOOSING)
    for number in range(2, line_limits.LINE_TOPICS + 1):
        conversation.receive(encode(Choose(Role.PUB, "7", str(number))))
        conversation.next_event()
        conversation.answer(Word.ACCEPT)
    conversation.receive(b"pub 7 topic more\npub 7 topic 2\n")
    assert isinstance(conversation.next_event(), Refused)
    assert conversation.next_event() == Choose(Role.PUB, "7", "2")


def test_what_is_sent_before_its_turn_waits_for_the_answer() -> None:
    conversation = Conversation()
    conversation.receive(b"pub 7 connect\nend\n")
    assert conversation.next_event() == Connect(Role.PUB, "7")
    assert conversation.next_event() is None
    assert conversation.unread_bytes == len(b"end\n")
    conversation.receive(b"pub 7 topic 1\n")
    conversation.answer(Word.ACCEPT)
    assert conversation.next_event() is Word.END
    conversation.answer(Word.ACCEPT)
    assert conversation.next_event() == Choose(Role.PUB, "7", "1")


def test_a_subscriber_has_one_entry_at_a_time() -> None:
    conversation = in_state(State.LISTENING)
    assert conversation.deliver(NEWS) == b"topic 1 [Ducks win]\n"
    with pytest.raises(AssertionError):
        conversation.deliver(NEWS)
    conversation.receive(b"quack\nsuccessful\nsuccessful\n")
    assert isinstance(conversation.next_event(), Refused)
    assert conversation.state is State.DELIVERING
    assert conversation.next_event() is Word.SUCCESSFUL
    assert isinstance(conversation.next_event(), Refused), "of which nothing was to be said"
    ready_made = encode(NEWS)
    assert conversation.deliver(NEWS, ready_made) is ready_made


def test_an_entry_too_long_or_not_asked_for_is_not_delivered() -> None:
    conversation = in_state(State.LISTENING, entry_bytes=16)
    with pytest.raises(RecordTooLarge, match="17 bytes"):
        conversation.deliver(Entry("1", b"q" * 17))
    with pytest.raises(AssertionError):
        conversation.deliver(Entry("2", b"q"))
    assert conversation.state is State.LISTENING
    assert conversation.deliver(Entry("1", b"\n" * 16)) == b"topic 1 [" + b"\\n" * 16 + b"]\n"


def test_an_answer_that_does_not_fit_is_our_own_mistake() -> None:
    conversation = Conversation()
    with pytest.raises(AssertionError):
        conversation.answer(Word.ACCEPT)
    conversation.receive(b"pub 7 connect\n")
    conversation.next_event()
    with pytest.raises(AssertionError):
        conversation.answer(Word.RETRY)


def test_the_answer_that_is_awaited_is_taken_in_one_step_and_nothing_else_is() -> None:
    for state in State:
        conversation = in_state(state)
        assert conversation.receive_successful(b"successful\n") == (state is State.DELIVERING)
        assert conversation.state is (State.LISTENING if state is State.DELIVERING else state)
    conversation = in_state(State.DELIVERING)
    for data in (b"", b"successful", b"successful\nsuccessful\n", b"successful\r\n", b"quack\n"):
        assert not conversation.receive_successful(data)
    conversation.receive(b"succ")
    assert conversation.next_event() is None
    assert not conversation.receive_successful(b"successful\n"), "it ends a line that has begun"
    conversation.receive(b"essful\n")
    assert conversation.next_event() is Word.SUCCESSFUL


# --- bounds ---------------------------------------------------------------------------------


def test_a_line_of_the_longest_entry_is_taken_however_it_is_written() -> None:
    conversation = in_state(State.PUBLISHING)
    entry = Entry("1", b"\n" * limits.LINE_ENTRY_BYTES)
    conversation.receive(encode(entry))
    assert conversation.next_event() == entry


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("piece_bytes", [1 << 16, 1 << 22])
def test_a_line_without_an_end_ends_the_conversation(end: bytes, piece_bytes: int) -> None:
    most = line_limits.LINE_HEAD_BYTES + 32 + line_limits.LINE_LEFT_OUT_BYTES
    data = b"pub 7 connect\n" + b"q" * (most + 1) + end
    assert conversed(pieces_of(data, piece_bytes), 16)[-1] == (
        ProtocolError,
        f"a line of more than {most} bytes: messages end with a newline",
    )


@each("state", [state for state in State if state not in (State.NEW, State.OVER)])
def test_so_many_bad_messages_in_a_row_end_the_conversation(state: State) -> None:
    conversation = in_state(state)
    conversation.receive(b"GET / HTTP/1.1\r\n" * (line_limits.LINE_REFUSALS + 5))
    for _ in range(line_limits.LINE_REFUSALS):
        assert isinstance(conversation.next_event(), Refused)
    with pytest.raises(ProtocolError, match="101 bad messages in a row"):
        conversation.next_event()
    assert conversation.state is State.OVER
    assert conversation.next_event() is None and conversation.unread_bytes == 0


def test_slips_between_good_messages_are_forgiven() -> None:
    conversation = in_state(State.PUBLISHING)
    for _ in range(2 * line_limits.LINE_REFUSALS):
        conversation.receive(b"oops\n" + encode(NEWS))
        assert isinstance(conversation.next_event(), Refused)
        assert conversation.next_event() == NEWS
        conversation.answer(Word.SUCCESSFUL)


# --- however the bytes come -----------------------------------------------------------------

SCRIPT = (
    b"pub 7 connect\r\nhello\nend\npub 8 topic 1\npub 7 topic 1\npub 7 topic 2\nend\n"
    + b"topic 1 [a]\ntopic 2 [b\\n]\ntopic 3 [c]\n\ntopic 1 [" + b"x" * 40 + b"]\n"
    + b"y" * 2_000 + b"\nsuccessful\ntopic 1 [d]\nterminate\nafter the end\n"
)  # fmt: skip


def test_a_conversation_is_the_same_byte_by_byte() -> None:
    whole = conversed([SCRIPT], 16)
    assert whole == conversed(pieces_of(SCRIPT, 1), 16)
    taken = [event for event in whole if isinstance(event, Connect | Choose | Entry | Word)]
    assert taken == [
        Connect(Role.PUB, "7"),
        Word.END,
        Choose(Role.PUB, "7", "1"),
        Choose(Role.PUB, "7", "2"),
        Word.END,
        Entry("1", b"a"),
        Entry("2", b"b\n"),
        Entry("1", b"d"),
        Word.TERMINATE,
    ]
    assert len(whole) - len(taken) == 7


lines = st.one_of(
    st.binary(max_size=40),
    messages.map(encode),
    st.sampled_from([encode(message) for message in KINDS]),
    st.sampled_from([b"\n", b"topic 1 [", b"]\n", b"q" * 700, b"successful\r\n", b"\\"]),
)


@CALM
@given(st.lists(lines, max_size=20), st.sampled_from(Role), st.data())
@example([b"q" * 700] * 2 + [b"\nend\n"], Role.PUB, None)
def test_any_bytes_give_the_same_events_however_they_are_cut(
    parts: list[bytes], role: Role, data: st.DataObject | None
) -> None:
    sent = b"".join([*map(encode, HELLO[role]), *parts])
    whole = conversed([sent], 16)
    assert whole == conversed(pieces_of(sent, 1), 16)
    if data is not None:
        cuts = sorted(data.draw(st.sets(st.integers(0, len(sent)), max_size=10)))
        pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
        assert whole == conversed(pieces, 16)


@CALM
@given(st.binary(max_size=300))
def test_any_bytes_give_events_or_a_protocol_error(data: bytes) -> None:
    assert conversed([data], 16) == conversed(pieces_of(data, 1), 16)


@CALM
@given(st.data())
def test_any_conversation_by_the_table_goes_as_it_says(data: st.DataObject) -> None:
    """A peer that keeps to the protocol, and whatever a broker may answer: nothing is refused."""
    conversation = Conversation()
    state = State.NEW
    own_id = data.draw(names)
    accepted: list[str] = []
    for _ in range(data.draw(st.integers(0, 30))):
        if state is State.OVER:
            break
        if state is State.LISTENING and accepted and data.draw(st.booleans()):
            entry = Entry(data.draw(st.sampled_from(accepted)), data.draw(contents))
            sent = conversation.deliver(entry)
            assert read(sent) == entry, "as the client reads it"
            state = State.DELIVERING
            continue
        choices = [kind for kind in TABLE[state] if kind is not Kind.ENTRY or accepted]
        kind = data.draw(st.sampled_from(choices))
        message = data.draw(of_kind(kind, own_id, accepted))
        step: Step = TABLE[state][kind]
        conversation.receive(encode(message))
        assert conversation.next_event() == message
        if not step.answers:
            state = step.next_state
            continue
        answer = data.draw(st.sampled_from(step.answers))
        assert read(conversation.answer(answer)) is answer
        if answer is step.answers[0]:
            state = step.next_state
            if isinstance(message, Choose) and message.topic not in accepted:
                accepted.append(message.topic)
        assert conversation.state is state
        assert conversation.topics == tuple(accepted)
    assert not conversation.has_pending_bytes


# --- helpers --------------------------------------------------------------------------------


def read(sent: bytes) -> Message:
    """As a client does."""
    (one,) = lines_of(sent)
    assert isinstance(one, bytes)
    return parse(one)


def conversed(pieces: Iterable[bytes], entry_bytes: int) -> list[object]:
    """What happens when all messages get their first answer and listeners an entry at once. Errors
    are equal to themselves alone; their kind and text are what counts."""
    conversation = Conversation(entry_bytes)
    happened: list[object] = []
    for piece in pieces:
        conversation.receive(piece)
        try:
            while (event := conversation.next_event()) is not None:
                happened.append(told(event.error) if isinstance(event, Refused) else event)
                if conversation.owes_answer:
                    assert not isinstance(event, Refused)
                    conversation.answer(first_answer(conversation.state, event))
                if conversation.state is State.LISTENING and "1" in conversation.topics:
                    conversation.deliver(NEWS)
        except ProtocolError as error:
            assert conversation.state is State.OVER
            return [*happened, told(error)]
    return happened


def told(error: QuackError) -> tuple[type[QuackError], str]:
    return type(error), str(error)


def pieces_of(data: bytes, piece_bytes: int) -> list[bytes]:
    return [data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)]


def of_kind(kind: Kind, own_id: str, accepted: list[str]) -> st.SearchStrategy[Message]:
    match kind:
        case Kind.PUB_CONNECT | Kind.SUB_CONNECT:
            return st.just(Connect(Role(kind[:3]), own_id))
        case Kind.PUB_TOPIC | Kind.SUB_TOPIC:
            return st.builds(Choose, st.just(Role(kind[:3])), st.just(own_id), topics)
        case Kind.ENTRY:
            return st.builds(Entry, st.sampled_from(accepted), contents)
        case Kind.GETENTRY:
            return st.builds(GetEntry, topics, st.integers(0, 9), st.integers(0, 9))
    return st.just(Word(kind))
