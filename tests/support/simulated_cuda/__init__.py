"""A CUDA device that is not there: ``SimulatedCuda`` drives the whole runtime with queues, on tensors of the CPU."""

from tests.support.simulated_cuda.driver import SimulatedCuda
from tests.support.simulated_cuda.queues import DeadlockError, Schedule
from tests.support.simulated_cuda.transport import Communicator

__all__ = ["Communicator", "DeadlockError", "Schedule", "SimulatedCuda"]
