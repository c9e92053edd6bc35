import pytest
from parallelenv._testing_steps import StepContract
class TestC(StepContract):
    @pytest.fixture(autouse=True)
    def _m(self, mode): self.para_mode = mode
