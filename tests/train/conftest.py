"""Training sets how many threads torch uses; what comes after these tests finds it as it was."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    import torch  # modules are skipped where it is missing

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
