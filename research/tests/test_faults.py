"""The command that strikes at random moments: its rounds, and that it goes on where it was killed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from research import faults


class TestRounds:
    """The command makes its faults in pieces, and counts each once."""

    def test_a_round_holds_each_kind_and_pair_with_both_signals_half_of_them_in_evaluation(self):
        for seed in range(3):
            made = faults.faults_of(seed)
            assert made == faults.faults_of(seed) and [fault.number for fault in made] == list(range(1, 21))
            assert len({(fault.kinds, fault.signal) for fault in made}) == 20
            assert {len(fault.kinds) for fault in made} == {1, 2} and {k for f in made for k in f.kinds} == set(faults.KINDS)
            assert [fault.phase for fault in made].count("evaluation") == 10
        assert [f.kinds for f in faults.faults_of(0)] != [f.kinds for f in faults.faults_of(1)]

    def test_a_command_goes_on_where_the_former_one_was_killed(self, tmp_path, monkeypatch, capsys):
        made = []

        class Attack:
            algorithm = SimpleNamespace(stop=lambda: None)

            def fault(self, fault):
                made.append(fault)
                return "" if len(made) != 7 else "OSError: gone"

        monkeypatch.setattr(faults, "Attack", Attack)
        monkeypatch.setattr(faults, "ray", SimpleNamespace(init=lambda **_: None, shutdown=lambda: None))
        record = tmp_path / "faults.jsonl"

        def command(*arguments: str) -> int:
            monkeypatch.setattr("sys.argv", ["faults", "--seed", "3", "4", "--record", str(record), *arguments])
            with pytest.raises(SystemExit) as ended:
                faults.main()
            return int(ended.value.code)

        assert command("--most", "5") == 0 and "all: 5 of 5 survived" in capsys.readouterr().out
        record.write_bytes(record.read_bytes()[:-20])  # killed while it wrote the fifth
        assert command() == 1
        assert made == [*faults.faults_of(3)[:5], *faults.faults_of(3)[4:], *faults.faults_of(4)]
        said = capsys.readouterr().out
        assert "all: 39 of 40 survived" in said and "single: " in said and "in evaluation: " in said
        assert command() == 1 and "all: 39 of 40 survived" in capsys.readouterr().out and len(made) == 41
        assert command("--again") == 0 and made[41:] == [made[6]] and "all: 40 of 40 survived" in capsys.readouterr().out
        assert record.read_text().count("OSError: gone") == 1  # the file forgets nothing
