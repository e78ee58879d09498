"""Policy server and client over real sockets: many clients, slow policies, killed and frozen servers, garbage."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from fake_server import FormulaPolicy, ServerProcess
from fakes import POLICY_SPEC
from malformed_frames import OBSERVATION, send_malformed, send_raw_garbage
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from sim.mujoco_world import ACTION_MEANING
from vla_rl.serving.client import PolicyClient, PolicyError, PolicyRefusedError, PolicyTimeoutError
from vla_rl.serving.server import PolicyServer
from vla_rl.serving.wire import decode, encode

SPEC = replace(POLICY_SPEC, action_meaning=ACTION_MEANING)
FORMULA_ACTIONS = np.full((4, 7), 8.0) + np.arange(4.0)[:, None]
"""What `FormulaPolicy` answers to `OBSERVATION`."""


@pytest.fixture
def policy() -> FormulaPolicy:
    return FormulaPolicy()


@pytest.fixture
def server(policy: FormulaPolicy) -> Iterator[PolicyServer]:
    with PolicyServer(policy, port=0, max_frame_bytes=2**20, max_waiting=3) as server:
        yield server


@pytest.fixture
def client(server: PolicyServer) -> Iterator[PolicyClient]:
    client = PolicyClient(server.url)
    client.connect()
    yield client
    client.close()


@pytest.fixture
def process() -> Iterator[ServerProcess]:
    process = ServerProcess()
    yield process
    process.close()


# --- What the protocol promises --------------------------------------------------------------------------------------


def test_a_round_trip(client: PolicyClient) -> None:
    assert client.connect() == FormulaPolicy().metadata  # connected already: the same answer again
    for seq in (1, 2):
        answer = client.infer({**OBSERVATION, "t_obs": 12.5}, deadline_s=10.0)
        np.testing.assert_array_equal(answer.actions, FORMULA_ACTIONS)
        assert (answer.t_obs, answer.seq) == (12.5, seq)
        assert set(answer.server_timing) == {"wait_ms", "infer_ms"}
    assert answer.actions.flags.writeable


def test_health(server: PolicyServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10.0)
    connection.request("GET", "/healthz")
    response = connection.getresponse()
    assert (response.status, response.read()) == (200, b"OK\n")
    connection.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observation/state": None}, "inference failed: TypeError"),
        ({"fail": True}, "inference failed: RuntimeError: the weights"),
    ],
)
def test_an_error_is_a_text_frame_and_then_1011(server: PolicyServer, change: dict, message: str) -> None:
    with connect(server.url, proxy=None) as connection:
        connection.recv(timeout=10.0)
        connection.send(encode({**OBSERVATION, **change}))
        assert message in str(connection.recv(timeout=10.0))
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(timeout=10.0)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011


def test_after_an_error_the_client_goes_on_with_a_new_connection(client: PolicyClient) -> None:
    with pytest.raises(PolicyError, match="the policy server says: observation/state is missing"):
        client.infer({"prompt": "pick"}, deadline_s=10.0)
    np.testing.assert_array_equal(client.infer(OBSERVATION, deadline_s=10.0).actions, FORMULA_ACTIONS)


def test_a_frame_that_is_too_long_closes_only_its_own_connection(server: PolicyServer, client: PolicyClient) -> None:
    with pytest.raises(PolicyError, match=r"is lost: .*(1009|too big|reset|pipe)"):
        client.infer({**OBSERVATION, "picture": np.zeros(2**21, dtype=np.uint8)}, deadline_s=10.0)
    np.testing.assert_array_equal(client.infer(OBSERVATION, deadline_s=10.0).actions, FORMULA_ACTIONS)


def test_an_answer_without_actions_is_refused(policy: FormulaPolicy, client: PolicyClient) -> None:
    for actions, message in [
        (None, "no actions, only torques"),
        (np.zeros(7), r"shape \(7,\)"),
        ("abc", "cannot be read"),
    ]:
        policy.infer = lambda _, a=actions: {"torques": 1} if a is None else {"actions": a}  # type: ignore[method-assign]
        with pytest.raises(PolicyError, match=message):
            client.infer(OBSERVATION, deadline_s=10.0)


# --- Many clients, slow policies -------------------------------------------------------------------------------------


def test_many_clients_get_their_own_answers_one_inference_at_a_time(
    policy: FormulaPolicy, server: PolicyServer
) -> None:
    def ask(number: int) -> list[float]:
        client = PolicyClient(server.url)
        client.connect()
        observation = {"observation/state": np.array([number], dtype=np.float32), "delay_s": 0.005}
        sums = [client.infer(observation, deadline_s=30.0).actions[0, 0] for _ in range(10)]
        client.close()
        return sums

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, range(3))) == [[float(number)] * 10 for number in range(3)]
    assert policy.max_running == 1


def test_slow_inference_does_not_break_the_connection() -> None:
    # openpi infers on the event loop: 50 s break a connection with a ping of 20 s. Here 2 s, and a ping of 0.4 s.
    with PolicyServer(FormulaPolicy(), port=0, keepalive_s=0.4) as server:
        client = PolicyClient(server.url)
        client.connect()
        for _ in range(2):
            answer = client.infer({**OBSERVATION, "delay_s": 2.0}, deadline_s=60.0)
            assert answer.seq <= 2
            np.testing.assert_array_equal(answer.actions, FORMULA_ACTIONS)
        client.close()


def test_requests_beyond_the_queue_are_refused(server: PolicyServer) -> None:
    gate, errors, answers = threading.Barrier(8), [], []

    def ask() -> None:
        client = PolicyClient(server.url)
        client.connect()
        gate.wait()
        try:
            answers.append(client.infer({**OBSERVATION, "delay_s": 0.3}, deadline_s=60.0))
        except PolicyError as error:
            errors.append(str(error))
        client.close()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) >= 3
    assert errors
    assert all("the server is busy: 3 requests are waiting" in error for error in errors)


def test_nobody_waits_for_the_answer_of_a_client_that_has_left(policy: FormulaPolicy, server: PolicyServer) -> None:
    first, second = PolicyClient(server.url), PolicyClient(server.url)
    first.connect()
    second.connect()
    running = threading.Thread(target=lambda: first.infer({**OBSERVATION, "delay_s": 1.0}, deadline_s=60.0))
    running.start()
    while policy.num_running == 0:
        time.sleep(0.01)
    with pytest.raises(PolicyTimeoutError):
        second.infer({**OBSERVATION, "delay_s": 30.0}, deadline_s=0.2)
    running.join()
    np.testing.assert_array_equal(second.infer(OBSERVATION, deadline_s=20.0).actions, FORMULA_ACTIONS)
    assert policy.num_answered == 2
    first.close()
    second.close()


# --- Deadlines -------------------------------------------------------------------------------------------------------


def test_a_late_answer_is_never_used(policy: FormulaPolicy, client: PolicyClient) -> None:
    late = {**OBSERVATION, "observation/state": np.array([1e6], dtype=np.float32), "delay_s": 0.5}
    with pytest.raises(PolicyTimeoutError, match=r"no answer from .* within 0\.1 s"):
        client.infer(late, deadline_s=0.1)
    for _ in range(3):
        np.testing.assert_array_equal(client.infer(OBSERVATION, deadline_s=20.0).actions, FORMULA_ACTIONS)
    assert policy.num_answered == 4  # the late one was computed, and nobody got it


def test_an_answer_to_another_observation_is_refused(policy: FormulaPolicy, client: PolicyClient) -> None:
    policy.infer = lambda _: {"actions": np.zeros((4, 7))}  # type: ignore[method-assign]
    client.infer(OBSERVATION, deadline_s=10.0)
    client._seq = 0  # as if the answer to the next request were the one to the first
    original = client._exchange
    client._exchange = lambda *a: encode({**decode(original(*a)), "seq": 7})  # type: ignore[method-assign]
    with pytest.raises(PolicyError, match="belongs to another observation"):
        client.infer(OBSERVATION, deadline_s=10.0)


def test_a_server_that_is_killed_is_an_error_and_its_successor_is_found(process: ServerProcess) -> None:
    client = PolicyClient(process.url, max_backoff_s=0.2)
    client.connect()
    client.infer(OBSERVATION, deadline_s=10.0)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(client.infer, {**OBSERVATION, "delay_s": 60.0}, deadline_s=30.0)
        time.sleep(0.3)
        process.close()
        with pytest.raises(PolicyError, match="is lost") as lost:
            pending.result(timeout=20.0)
        assert not isinstance(lost.value, PolicyTimeoutError)
    with pytest.raises(PolicyError, match="cannot reach a policy server at"):
        client.infer(OBSERVATION, deadline_s=10.0)
    with pytest.raises(PolicyError, match="the next attempt may be made in"):
        client.infer(OBSERVATION, deadline_s=10.0)
    successor = ServerProcess(process.port)
    client.connect()
    np.testing.assert_array_equal(client.infer(OBSERVATION, deadline_s=10.0).actions, FORMULA_ACTIONS)
    successor.close()
    client.close()


def test_another_policy_at_the_same_address_is_refused(process: ServerProcess) -> None:
    client = PolicyClient(process.url)
    client.connect()
    process.close()
    with pytest.raises(PolicyError):
        client.infer(OBSERVATION, deadline_s=10.0)
    successor = ServerProcess(process.port, contract="another")
    with pytest.raises(PolicyRefusedError, match="now serves another policy than at first"):
        client.connect()
    successor.close()
    client.close()


@pytest.mark.parametrize("num_bytes", [10, 2**25])
def test_a_frozen_server_costs_no_more_than_the_deadline(process: ServerProcess, num_bytes: int) -> None:
    # The large frame does not fit into the sockets' buffers: the client hangs in sending, not in receiving.
    client = PolicyClient(process.url)
    client.connect()
    os.kill(process.process.pid, signal.SIGSTOP)
    with pytest.raises(PolicyTimeoutError, match=r"within 0\.3 s"):
        client.infer({**OBSERVATION, "padding": np.zeros(num_bytes, dtype=np.uint8)}, deadline_s=0.3)
    with pytest.raises(PolicyError):  # neither does opening a new connection
        client.infer(OBSERVATION, deadline_s=0.3)
    client.close()


def test_closing_from_another_thread_ends_a_wait(client: PolicyClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(client.infer, {**OBSERVATION, "delay_s": 3.0}, deadline_s=200.0)
        time.sleep(0.2)
        client.close()
        client.close()
        with pytest.raises(PolicyError, match="this client was closed"):
            pending.result(timeout=60.0)
    for use in (lambda: client.infer(OBSERVATION, deadline_s=1.0), client.connect):
        with pytest.raises(PolicyError, match="this client is closed"):
            use()


def test_connect_waits_for_a_server_that_is_still_starting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    client = PolicyClient(f"ws://127.0.0.1:{port}", timeout_s=60.0, max_backoff_s=0.2)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(client.connect)
        time.sleep(0.3)
        with PolicyServer(FormulaPolicy(), port=port):
            assert pending.result(timeout=60.0)["server"] == "fake"
            client.close()


def test_connect_gives_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        client = PolicyClient(f"ws://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3)
        with pytest.raises(PolicyError, match="cannot reach a policy server at ws://"):
            client.connect()


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_deadline_is_a_positive_time(client: PolicyClient, deadline_s: float) -> None:
    with pytest.raises(ValueError, match="expected a positive time"):
        client.infer(OBSERVATION, deadline_s=deadline_s)


def test_an_address_is_a_websocket() -> None:
    with pytest.raises(ValueError, match=r"expected e\.g\. 'ws://127"):
        PolicyClient("http://127.0.0.1:8000")


# --- Who may connect, and where --------------------------------------------------------------------------------------


def test_the_key_is_checked() -> None:
    with PolicyServer(FormulaPolicy(), port=0, api_key="correct horse") as server:
        client = PolicyClient(server.url, api_key="correct horse")
        client.connect()
        client.close()
        for wrong in (None, "", "correct", "Correct horse"):
            with pytest.raises(PolicyRefusedError, match="wrong or missing API key"):
                PolicyClient(server.url, api_key=wrong).connect()
        twice = [("Authorization", "Api-Key correct horse"), ("Authorization", "Api-Key wrong")]
        with pytest.raises(InvalidStatus), connect(server.url, additional_headers=twice, proxy=None):
            pass
        test_health(server)


@pytest.mark.parametrize("key", ["", " key", "key\r\nX: y", "schl\xfcssel"])
def test_a_key_must_fit_into_a_header(key: str) -> None:
    with pytest.raises(ValueError, match="the API key must be"):
        PolicyServer(FormulaPolicy(), api_key=key)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "robot.example"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(ValueError, match=r"can be reached from other machines.*--api-key-file"):
        PolicyServer(FormulaPolicy(), host=host)
    PolicyServer(FormulaPolicy(), host=host, api_key="key")
    for loopback in ("127.0.0.1", "127.0.0.11", "::1", "localhost"):
        PolicyServer(FormulaPolicy(), host=loopback)


def test_web_pages_are_refused(server: PolicyServer) -> None:
    with pytest.raises(InvalidStatus, match="403"), connect(server.url, origin="http://evil.example", proxy=None):  # type: ignore[arg-type]
        pass


def test_an_address_in_use_is_one_clear_error(server: PolicyServer) -> None:
    second = PolicyServer(FormulaPolicy(), port=server.port)
    with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1 port {server.port} .*choose another"):
        second.start()
    second.stop()


def test_nobody_can_connect_before_the_warm_up_is_over(policy: FormulaPolicy) -> None:
    with PolicyServer(policy, port=0, warm_up=OBSERVATION) as server:
        assert policy.num_answered == 1
        PolicyClient(server.url).connect()
    with pytest.raises(RuntimeError, match="on fire"):
        PolicyServer(policy, port=0, warm_up={"fail": True}).start()


def test_stopping_says_goodbye_and_frees_the_port(policy: FormulaPolicy) -> None:
    with PolicyServer(policy, port=0) as server, connect(server.url, proxy=None) as connection:
        connection.recv(timeout=10.0)
        connection.send(encode({**OBSERVATION, "delay_s": 0.5}))
        while policy.num_running == 0:
            time.sleep(0.01)
        server.stop()
        server.stop()
        assert policy.num_running == 0  # the inference under way has ended
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(timeout=10.0)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
        with PolicyServer(policy, port=server.port):
            pass


def test_a_signal_ends_the_process_in_order(process: ServerProcess) -> None:
    client = PolicyClient(process.url)
    client.connect()
    process.process.send_signal(signal.SIGTERM)
    assert process.process.wait(timeout=60.0) == 0
    client.close()


# --- Garbage ---------------------------------------------------------------------------------------------------------


def test_malformed_frames_do_no_harm(process: ServerProcess) -> None:
    check_garbage(process, 2000)


def check_garbage(process: ServerProcess, num: int) -> None:
    """`tests/robots/test_openpi_peers.py` sends 10,000, which takes a minute."""
    send_malformed(process.url, 400, seed=1)  # what is allocated once
    before = process.memory_bytes()
    outcomes = send_malformed(process.url, num)
    send_raw_garbage(process.port, num // 20)
    assert outcomes.total() == num
    assert outcomes["text"] > num / 2  # most are told why
    assert process.process.poll() is None
    assert process.memory_bytes() - before < 20 * 2**20
    client = PolicyClient(process.url)
    client.connect()
    np.testing.assert_array_equal(client.infer(OBSERVATION, deadline_s=10.0).actions, FORMULA_ACTIONS)
    client.close()
