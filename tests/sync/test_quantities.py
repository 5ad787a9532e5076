"""Quantities with units, and what is refused."""

import pytest

from moe_async.errors import SyncError
from moe_async.sync.quantities import parse_bandwidth, parse_factor, parse_rate, parse_seconds, parse_share


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_seconds, "20ms", 0.02),
        (parse_seconds, "1.5h", 5400.0),
        (parse_seconds, "0s", 0.0),
        (parse_seconds, " 2min ", 120.0),
        (parse_bandwidth, "1Gbit", 125e6),
        (parse_bandwidth, "100MB", 100e6),
        (parse_rate, "1/h", 1 / 3600),
        (parse_rate, "0.5/min", 0.5 / 60),
        (parse_factor, "5x", 5.0),
        (parse_share, "10%", 0.1),
        (parse_share, "100%", 1.0),
    ],
)
def test_a_number_and_its_unit(parse, text, value):
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_seconds, "20", "'20' is not a duration: a number followed by one of us, ms, s, min, h"),
        (parse_seconds, "20 ms", "not a duration"),
        (parse_seconds, "-1s", "not a duration"),
        (parse_seconds, "1e3s", "not a duration"),
        (parse_seconds, "", "not a duration"),
        (parse_bandwidth, "1gbit", "Write it like 1Gbit, 250Mbit or 100MB"),
        (parse_bandwidth, "1Gb", "not a bandwidth"),
        (parse_bandwidth, "0Mbit", "nothing would ever arrive"),
        (parse_rate, "1h", "Write it like 1/h"),
        (parse_factor, "5", "Write it like 5x"),
        (parse_factor, "0x", "Give more than 0x"),
        (parse_share, "0.1", "Write it like 10%"),
        (parse_share, "101%", "more than everything"),
    ],
)
def test_what_is_no_quantity(parse, text, message):
    with pytest.raises(SyncError, match=message):
        parse(text)
