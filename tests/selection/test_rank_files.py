"""Files of measured rates: what is read, stored and refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_tables import CAUSAL, RUN, explain, table

from undivided import InputError
from undivided.selection import decision as selection
from undivided.selection import measured as _measured


class TestFiles:
    @pytest.fixture
    def users(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        monkeypatch.delenv("UNDIVIDED_RANKS", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        _measured.tables.cache_clear()
        yield tmp_path / "undivided" / "ranks.json"
        _measured.tables.cache_clear()

    def test_a_written_table_is_read_and_used(self, users: Path) -> None:
        _measured.write(users, table(cudnn=3e14, triton=5e14))
        assert _measured.read(users) == table(cudnn=3e14, triton=5e14)
        _measured.tables.cache_clear()
        assert explain().backend.name == "triton"
        assert len(_measured.tables()) == 2

    def test_entries_are_replaced_one_by_one(self) -> None:
        old, new = table(cudnn=1.0), table(length=8192, cudnn=2.0)
        both = _measured.merged(old, new)
        assert len(both[CAUSAL]) == 2
        assert _measured.merged(both, table(triton=3.0)) == _measured.merged(table(triton=3.0), new)

    def test_places_are_counted_with_the_date_of_the_newest(self, users: Path) -> None:
        before = _measured.count_entries("sm90")
        older = table(run=RUN._replace(when="2026-11-30T00:00:00+00:00"), cudnn=1.0)
        _measured.write(users, _measured.merged(older, table(length=8192, cudnn=2.0)))
        _measured.tables.cache_clear()
        assert _measured.count_entries("sm90") == (2, before.ours, "2027-01-02")
        assert _measured.count_entries("sm80").users == 0

    def test_no_file_is_an_empty_table(self, users: Path) -> None:
        assert _measured.read(users) == {}
        assert explain().backend is not None

    def test_a_variable_that_names_a_missing_file_gives_one_warning(
        self, users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A misspelt path was once treated as an empty table, without a message."""
        monkeypatch.setenv("UNDIVIDED_RANKS", str(tmp_path / "rank.json"))
        with pytest.warns(RuntimeWarning, match=r"UNDIVIDED_RANKS must name a file that exists, got .*rank\.json"):
            assert explain().backend is not None
        assert explain().backend is not None, "once is enough"

    def test_a_variable_whose_file_the_system_refuses_to_look_up_ends_no_call(
        self, users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A name that is too long, or in a folder without permission, ended every call with an OSError."""
        monkeypatch.setenv("UNDIVIDED_RANKS", str(tmp_path / ("x" * 300)))
        with pytest.warns(RuntimeWarning, match=r"UNDIVIDED_RANKS must name a file that exists"):
            assert explain().backend is not None

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("{", "Expecting property name"),
            ("[]", "another type"),
            ("{}", "schema"),
            ('{"schema": 9, "runs": {}, "rates": {}}', "schema 9"),
            ('{"schema": 1, "runs": {}, "rates": {"k": {"1/2": ["0", {}]}}}', "'0'"),
            ('{"schema": 1, "runs": {}, "rates": {"k": {"one": ["0", {}]}}}', "invalid literal"),
            ('{"schema": 1, "runs": {"0": {}}, "rates": {}}', "missing"),
        ],
    )
    def test_a_file_that_is_not_a_table_is_ignored_with_a_warning(self, users: Path, text: str, expected: str) -> None:
        users.parent.mkdir()
        users.write_text(text)
        with pytest.raises(InputError, match=expected):
            _measured.read(users)
        with pytest.warns(
            RuntimeWarning, match=r"ranks\.json must be a table of ranks.*the package's own ranks are used"
        ):
            assert explain().backend is not None
        assert explain().backend is not None, "once is enough"

    @pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
    def test_an_invalid_rate_is_refused(self, users: Path, rate: float) -> None:
        _measured.write(users, table(cudnn=rate))
        with pytest.raises(InputError, match="is not a positive number"):
            _measured.read(users)

    def test_the_packages_table_is_right_and_its_reports_are_kept(self) -> None:
        found = _measured.read(_measured.PACKAGE_TABLE)
        kept = {path.name for path in (Path(__file__).parents[2] / "benchmarks").glob("*.json")}
        for kind, places in found.items():
            assert kind.count("/") == 4
            for entry in places.values():
                assert entry.run.report in kept
                assert set(entry.rates) <= {backend.name for backend in selection.all_backends()}
