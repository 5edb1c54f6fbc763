"""Every case by which this broker and Apache Kafka are compared: modules add theirs here."""

from tests.likeness import committing as committing
from tests.likeness import configuring as configuring
from tests.likeness import describing as describing
from tests.likeness import fetching as fetching
from tests.likeness import flowing as flowing
from tests.likeness import grouping as grouping
from tests.likeness import producing as producing
from tests.likeness import topics as topics
from tests.likeness import transacting as transacting
from tests.likeness.asking import CASES as CASES
