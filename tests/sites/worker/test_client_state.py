"""The client state of a run survives its process; a state of another offer or format is refused."""

import pytest
import torch

from pipeline.core.errors import RunFolderError
from pipeline.core.tensor_io import load_tensors, save_tensors
from privacy.ledger.countersigner import LedgerCountersigner
from sites.worker.run_worker import open_run_worker
from tests.support.audit_factory import make_tiny_study
from tests.support.hospital import SETTINGS, SITE, Hospital


@pytest.fixture
def open_worker(tmp_path):
    hospital = Hospital(tmp_path)
    offer = hospital.make_offer(make_tiny_study(sites={"count": 2}))
    settings = SETTINGS.model_copy(update={"simulated_site": "site-01", "steps_per_second": None})
    countersigner = LedgerCountersigner(tmp_path / "receipts", hospital.coordinator)
    return lambda: open_run_worker(hospital.path, SITE, offer, countersigner.countersign, settings)


@pytest.fixture
def saved_worker(open_worker):
    worker = open_worker()
    worker.is_speed_measured, worker.steps_per_second = True, 12.5
    worker.state_store.committed = {"v": torch.tensor([1.0])}
    worker.state_store.personal_model = {"weights": torch.tensor([3.0, 4.0])}
    worker.state_store.set_pending({"v": torch.tensor([2.0])}, (7, 3))
    worker._save_state()
    return worker


def test_client_state_is_restored(saved_worker, open_worker):
    restored = open_worker()
    restored.is_speed_measured = True
    restored.restore_state()
    assert restored.steps_per_second == 12.5
    assert restored.state_store.latest_state((6, 3))["v"] == 1.0
    assert restored.state_store.latest_state((7, 3))["v"] == 2.0
    assert restored.state_store.personal_model["weights"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("change", "message"), [({"offer": "0" * 64}, "another offer"), ({"format": 1}, "another format")]
)
def test_client_state_of_another_offer_or_format_is_refused(saved_worker, open_worker, change, message):
    header, tensors = load_tensors(saved_worker.state_file)
    save_tensors(saved_worker.state_file, header | change, tensors)
    with pytest.raises(RunFolderError, match=message):
        open_worker()
