"""The line protocol: every cell of its table, the same events however the bytes come, bounds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from quackmq import limits
from quackmq.errors import InvalidRequest, ProtocolError, QuackError, RecordTooLarge
from quackmq.protocols.line import limits as line_limits
from quackmq.protocols.line.codec import conversation as line
from quackmq.protocols.line.codec.conversation import (
    TABLE,
    Choose,
    Connect,
    Conversation,
    Entry,
    Kind,
    Lines,
    Message,
    Refused,
    Rejection,
    Role,
    State,
    Step,
    Word,
    encode,
    kind_of,
    parse,
)
from quackmq.protocols.line.codec.polling import GetEntry, NoEntry
from tests.kit.tables import each

NEWS = Entry("1", b"Ducks win")

#: Messages of the document, and what our framing makes of entries.
MESSAGES = [
    (b"pub 7 connect", Connect(Role.PUB, "7")),
    (b"sub daisy connect", Connect(Role.SUB, "daisy")),
    (b"end", Word.END),
    (b"pub 7 topic 1", Choose(Role.PUB, "7", "1")),
    (b"sub daisy topic ducks.news", Choose(Role.SUB, "daisy", "ducks.news")),
    (b"topic 1 [Ducks win]", NEWS),
    (b"topic 1 []", Entry("1", b"")),
    (b"topic 1 [ a  b ]", Entry("1", b" a  b ")),
    (b"topic 1 [[a] [b]]", Entry("1", b"[a] [b]")),
    (b"topic 1 []]", Entry("1", b"]")),
    (b"topic [ [ [a]", Entry("[", b" [a")),
    (rb"topic 1 [two\nlines\r\0\\n]", Entry("1", b"two\nlines\r\0\\n")),
    (b"topic 1 [\xff\xfe\x1b]", Entry("1", b"\xff\xfe\x1b")),
    (b"accept", Word.ACCEPT),
    (b"reject", Word.REJECT),
    (b"reject topic_full: topic 1 is full", Rejection("topic_full: topic 1 is full")),
    (b"successful", Word.SUCCESSFUL),
    (b"retry", Word.RETRY),
    (b"terminate", Word.TERMINATE),
]

names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)
topics = st.text("abcXYZ019._-[]", min_size=1, max_size=20)
contents = st.binary(max_size=60) | st.text("[]\\nr0 \n\r\0", max_size=20).map(str.encode)
roles = st.sampled_from(Role)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Connect, roles, names),
    st.builds(Choose, roles, names, topics),
    st.builds(Entry, topics, contents),
    st.sampled_from(Word),
    st.builds(Rejection, names),
)


#: Machines can be busy.
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# --- messages as lines ----------------------------------------------------------------------


@each(("text", "message"), MESSAGES)
def test_a_message_is_a_line_and_a_line_a_message(text: bytes, message: Message) -> None:
    assert encode(message) == text + b"\n"
    assert parse(text) == message


@CALM
@given(messages)
def test_any_message_comes_back_as_it_was_from_one_plain_line(message: Message) -> None:
    written = encode(message)
    assert written.endswith(b"\n") and not {*b"\n\r\0"} & {*written[:-1]}
    assert lines_of(written) == [written[:-1]]
    assert parse(written[:-1]) == message


def test_a_carriage_return_and_a_zero_are_taken_as_they_are_and_one_may_end_a_line() -> None:
    assert lines_of(b"topic 1 [a\rb\0]\r\nend\r\n\r\n") == [b"topic 1 [a\rb\0]", b"end", b""]
    assert parse(b"topic 1 [a\rb\0\r]") == Entry("1", b"a\rb\0\r")


@each(
    ("text", "said"),
    [
        (b"", "no message"),
        (b"quack", "no message"),
        (b"END", "no message"),
        (b"end ", "no message"),
        (b" end", "no message"),
        (b"pub  connect", "1 to 255 bytes"),
        (b"pub 1  connect", "no message"),
        (b"pub 1 connect now", "no message"),
        (b"pub 1 topic", "no message"),
        (b"pub 1 topic ", "1 to 249 bytes"),
        (b"pub 1 topic 1 2", "no message"),
        (b"pub " + b"d" * 256 + b" connect", "1 to 255 bytes, not 256"),
        (b"pub 1 topic " + b"d" * 250, "1 to 249 bytes, not 250"),
        (b"sub \xff connect", "not UTF-8"),
        (b"sub \x1b[2J connect", "control characters"),
        (b"topic 1", "write topic K"),
        (b"topic 1 quack", "write topic K"),
        (b"topic 1 [quack", "write topic K"),
        (b"topic 1 quack]", "write topic K"),
        (b"topic 1 2 [quack]", "write topic K"),
        (b"topic  [quack]", "1 to 249 bytes"),
        (b"topic [quack]", "write topic K"),
        (b"topic 1 [", "write topic K"),
        (rb"topic 1 [\x]", "a backslash must precede"),
        (b"topic 1 [\\]", "a backslash must precede"),
    ],
)
def test_what_is_no_message_is_said_to_be_none(text: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        parse(text)


def test_the_size_of_an_entry_counts_its_bytes_and_not_their_writing() -> None:
    assert parse(rb"topic 1 [\n\n\n]", entry_bytes=3) == Entry("1", b"\n\n\n")
    with pytest.raises(RecordTooLarge, match="4 bytes; the limit is 3"):
        parse(b"topic 1 [abcd]", entry_bytes=3)


@CALM
@given(st.binary(max_size=60) | st.sampled_from([text for text, _ in MESSAGES]))
@example(b"reject \0 a")
@example(b"reject " + b"a" * (line_limits.LINE_REASON_BYTES - 1) + b" b")
def test_any_line_is_a_message_or_an_error_of_ours(text: bytes) -> None:
    try:
        message = parse(text)
    except InvalidRequest:
        return
    assert parse(encode(message)[:-1]) == message


# --- the table ------------------------------------------------------------------------------

#: The shortest way into each state.
HELLO: dict[Role, list[Message]] = {
    role: [Connect(role, "7"), Word.END, Choose(role, "7", "1"), Word.END] for role in Role
}
WAYS: dict[State, list[Message]] = {
    State.NEW: [],
    State.PUB_NAMED: HELLO[Role.PUB][:1],
    State.PUB_CHOOSING: HELLO[Role.PUB][:3],
    State.PUBLISHING: HELLO[Role.PUB],
    State.SUB_NAMED: HELLO[Role.SUB][:1],
    State.SUB_CHOOSING: HELLO[Role.SUB][:3],
    State.LISTENING: HELLO[Role.SUB],
    State.DELIVERING: HELLO[Role.SUB],
    State.OVER: [Word.TERMINATE],
}
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


def test_a_line_too_long_is_not_kept() -> None:
    lines = Lines(entry_bytes=16)
    for _ in range(100):
        lines.receive(b"q" * 1_000)
        assert lines.next_line() is None
        assert (
            lines.unread_bytes == 0 and len(lines._partial_line) <= line_limits.LINE_HEAD_BYTES + 32
        )
    assert lines.has_pending_bytes
    lines.receive(b"\nend\n")
    assert isinstance(lines.next_line(), RecordTooLarge)
    assert lines.next_line() == b"end"
    assert not lines.has_pending_bytes


@pytest.mark.parametrize("cut", [0, 1, 1_000, 1_055, 1_056])
def test_a_line_is_taken_up_to_its_bound_wherever_it_is_cut(cut: int) -> None:
    most = line_limits.LINE_HEAD_BYTES + 32
    for size in (most, most + 1):
        reader = Lines(entry_bytes=16)
        reader.receive(b"q" * cut)
        assert reader.next_line() is None
        reader.receive(b"q" * (size - cut) + b"\nend\n")
        found = reader.next_line()
        assert found == b"q" * most if size == most else isinstance(found, RecordTooLarge)
        assert reader.next_line() == b"end", "nothing is left of it"


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


def lines_of(data: bytes) -> list[bytes | RecordTooLarge]:
    reader = Lines()
    reader.receive(data)
    found = []
    while (one := reader.next_line()) is not None:
        found.append(one)
    return found


def read(sent: bytes) -> Message:
    """As a client does."""
    (one,) = lines_of(sent)
    assert isinstance(one, bytes)
    return parse(one)


def in_state(state: State, entry_bytes: int = limits.LINE_ENTRY_BYTES) -> Conversation:
    """A conversation that has come so far, each message having got its first answer."""
    conversation = Conversation(entry_bytes)
    for message in WAYS[state]:
        conversation.receive(encode(message))
        assert conversation.next_event() == message
        conversation.answer(first_answer(conversation.state, message))
    if state is State.DELIVERING:
        conversation.deliver(NEWS)
    assert conversation.state is state
    return conversation


def first_answer(state: State, message: Message) -> Word:
    return TABLE[state][kind_of(message)].answers[0]


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
            return st.builds(GetEntry, topics, st.integers(0, 9))
    return st.just(Word(kind))
