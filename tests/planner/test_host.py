from trimtab.planner.host import PROCESS_BYTES, TracedTensors, predict_host
from trimtab.planner.trace.recorder import Birth, Trace
from trimtab.techniques.base import HostUse


def trace(gradients: list[int], state: list[int]) -> Trace:
    births = {number: Birth(size, "backward", "", False, None) for number, size in enumerate(gradients)}
    first = len(births)
    births |= {first + number: Birth(size, "state", "", False, None) for number, size in enumerate(state)}
    return Trace((), births, (), (), frozenset(range(first)), (), {})


def test_the_peak_is_that_of_loading_or_of_saving():
    found = predict_host(TracedTensors.of(trace([400], [800])), loaded_bytes=5000, use=HostUse())
    assert found.snapshot == 1200
    assert found.memory == PROCESS_BYTES + 5000
    streamed = predict_host(TracedTensors.of(trace([400], [800])), loaded_bytes=5000, use=HostUse(streams_weights=True))
    assert streamed.memory == PROCESS_BYTES + 1200


def test_paged_state_and_embeddings_stay_on_the_host():
    found = predict_host(
        TracedTensors.of(trace([400], [8])), loaded_bytes=0, use=HostUse(1000, pages_state=True, exports_trainable=True)
    )
    assert found.kept == 1000 + 200
    assert found.checkpoint == 400 + 8 + 200
    assert found.model == 400


def test_one_checkpoint_more_than_is_kept_has_to_have_room():
    found = predict_host(TracedTensors.of(trace([400], [])), loaded_bytes=5000, use=HostUse(), num_kept=3)
    assert found.disk == 4 * 400 + 2 * 5000
