"""The parts of the RePo experiment that its smoke scale leaves out, on a tiny model."""

import torch
from tiny_folder import write_tiny_folder

from longspan.experiments import repo_position as experiment
from longspan.models import load


def test_the_module_reads_the_places_it_is_told():
    x = torch.zeros(1, 4, 8, dtype=torch.float64)
    x[..., 0], x[..., 1] = 1.0, torch.tensor([0.0, 4096.0, -3.5, 2.0])
    places = experiment.reads_places().places(x, experiment.Context.of(1, 4))
    torch.testing.assert_close(places[0, 0], x[0, :, 1])


def test_a_needle_at_the_query_does_not_fade():
    """Distance costs the integer needle its mass; at one and the same place only the distractors' share is left."""
    near = [experiment.needle_mass(n, 512, 4, at_query=True) for n in (1, 500)]
    far = [experiment.needle_mass(n, 512, 4, at_query=False) for n in (1, 500)]
    assert min(near) > 0.97 and abs(near[0] - near[1]) < 1e-3 and far[0] > 0.9 > 0.3 > far[1]


def test_training_on_text_goes_on_from_its_checkpoints(tmp_path, monkeypatch):
    folder = write_tiny_folder(tmp_path / "base")
    monkeypatch.setattr(experiment, "load", lambda **options: load(folder, dtype="float32", device="cpu"))
    monkeypatch.setattr(experiment, "read_text", lambda name: "the quick brown fox jumps over the lazy dog. " * 80)
    monkeypatch.setattr(experiment, "START", 1)
    size = {"context": 24, "text_steps": 12, "windows": 3}
    rows, found = experiment.continued(size, lambda what: None, None)
    kept = experiment.continued(size, lambda what: None, tmp_path / "kept")
    told: list[str] = []
    again = experiment.continued(size, told.append, tmp_path / "kept")
    assert [row["run"] for row in rows] == ["text, the bundled model", "text, RePo", "text, NoPE"]
    assert rows[1]["loss"] < rows[1]["loss at step 0"] and rows[2]["loss"] < rows[2]["loss at step 0"]
    assert rows[1]["trained"] > rows[2]["trained"] == 32 * 32 + 32 * 16
    assert kept == (rows, found) == again and not any("step" in what for what in told)
    assert found["RePo minus NoPE, nats"]["windows"] == 3 and found["learned places"]["layers"] == 1
