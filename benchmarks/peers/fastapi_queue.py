"""What a user would write instead: the queue's HTTP endpoints in FastAPI with SQLite, plainly.

    QUEUE_DATABASE=FILE python -m uvicorn benchmarks.peers.fastapi_queue:app

The endpoints, parameters and answers are those of the queue document, as far as a benchmark asks
for them. Written as the documents of both say: endpoints are plain functions, which FastAPI runs in
its threads; a connection for each thread; a transaction for each request. What is answered is on
disk: `synchronous = FULL`, with the write-ahead log, which is SQLite's fastest way of that.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

SCHEMA = """
CREATE TABLE topics (name TEXT PRIMARY KEY);
CREATE TABLE producers (id INTEGER PRIMARY KEY, topic TEXT NOT NULL REFERENCES topics);
CREATE TABLE consumers (
    id INTEGER PRIMARY KEY, topic TEXT NOT NULL REFERENCES topics, position INTEGER NOT NULL
);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY, topic TEXT NOT NULL REFERENCES topics, message TEXT NOT NULL
);
CREATE INDEX messages_of_topic ON messages (topic, id);
"""

mine = threading.local()
#: SQLite writes one transaction at a time. Who finds it busy sleeps and looks again; waiting here
#: is faster.
turn = threading.Lock()


@contextmanager
def transaction() -> Iterator[sqlite3.Connection]:
    if not hasattr(mine, "connection"):
        mine.connection = sqlite3.connect(
            os.environ["QUEUE_DATABASE"], timeout=60, isolation_level=None
        )
        mine.connection.execute("PRAGMA journal_mode = WAL")
        mine.connection.execute("PRAGMA synchronous = FULL")
    connection: sqlite3.Connection = mine.connection
    with turn:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with sqlite3.connect(os.environ["QUEUE_DATABASE"]) as connection:
        connection.executescript(SCHEMA)
    connection.close()
    yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(HTTPException)
async def failure(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({"status": "failure", "message": error.detail}, error.status_code)


class Topic(BaseModel):
    topic: str


class Produced(BaseModel):
    topic: str
    producer_id: str
    message: str


@app.post("/producer/register")
def register_producer(body: Topic) -> dict[str, str]:
    with transaction() as connection:
        connection.execute("INSERT OR IGNORE INTO topics VALUES (?)", (body.topic,))
        added = connection.execute("INSERT INTO producers (topic) VALUES (?)", (body.topic,))
    return {"status": "success", "producer_id": f"producer-{added.lastrowid}"}


@app.post("/consumer/register")
def register_consumer(body: Topic) -> dict[str, str]:
    with transaction() as connection:
        check_topic(connection, body.topic)
        last = "SELECT ifnull(max(id), 0) FROM messages WHERE topic = ?"
        (position,) = connection.execute(last, (body.topic,)).fetchone()
        added = connection.execute(
            "INSERT INTO consumers (topic, position) VALUES (?, ?)", (body.topic, position)
        )
    return {"status": "success", "consumer_id": f"consumer-{added.lastrowid}"}


@app.post("/producer/produce")
def produce(body: Produced) -> dict[str, str]:
    with transaction() as connection:
        check_topic(connection, body.topic)
        known = connection.execute(
            "SELECT topic FROM producers WHERE id = ?", (number(body.producer_id),)
        ).fetchone()
        if known is None or known[0] != body.topic:
            raise HTTPException(404, f"{body.producer_id} is no producer of {body.topic}")
        connection.execute(
            "INSERT INTO messages (topic, message) VALUES (?, ?)", (body.topic, body.message)
        )
    return {"status": "success"}


@app.get("/consumer/consume")
def consume(topic: str, consumer_id: str) -> dict[str, str]:
    with transaction() as connection:
        check_topic(connection, topic)
        consumer = connection.execute(
            "SELECT id, topic, position FROM consumers WHERE id = ?", (number(consumer_id),)
        ).fetchone()
        if consumer is None or consumer[1] != topic:
            raise HTTPException(404, f"{consumer_id} is no consumer of {topic}")
        following = connection.execute(
            "SELECT id, message FROM messages WHERE topic = ? AND id > ? ORDER BY id LIMIT 1",
            (topic, consumer[2]),
        ).fetchone()
        if following is None:
            raise HTTPException(404, f"{consumer_id} has read all of {topic}")
        connection.execute(
            "UPDATE consumers SET position = ? WHERE id = ?", (following[0], consumer[0])
        )
    return {"status": "success", "message": following[1]}


def check_topic(connection: sqlite3.Connection, topic: str) -> None:
    if connection.execute("SELECT 1 FROM topics WHERE name = ?", (topic,)).fetchone() is None:
        raise HTTPException(404, f"there is no topic {topic}")


def number(client_id: str) -> int:
    try:
        return int(client_id.rpartition("-")[2])
    except ValueError:
        raise HTTPException(404, f"there is no {client_id}") from None
