"""openpi's own client or server, unmodified; runs in openpi's environment, which knows nothing of this project."""

import json
import sys

import numpy as np

if sys.argv[1] == "client":
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    client = WebsocketClientPolicy("127.0.0.1", int(sys.argv[2]))
    answers = []
    for scale in (1.0, 2.0):
        observation = {
            "observation/state": scale * np.arange(8, dtype=np.float32),
            "picture": np.zeros((224, 224, 3), np.uint8),
            "prompt": "pick up the cube",
        }
        answers.append(np.asarray(client.infer(observation)["actions"]).tolist())
    try:
        client.infer({"prompt": "no state"})
        error = ""
    except RuntimeError as caught:
        error = str(caught)
    print(json.dumps({"metadata": client.get_server_metadata(), "answers": answers, "error": error}))
else:
    from openpi_server.websocket_policy_server import WebsocketPolicyServer

    class Policy:
        def infer(self, obs):
            total = float(np.sum(obs["observation/state"]))
            return {"actions": np.full((4, 7), total, dtype=np.float32)}

        def reset(self):
            pass

    WebsocketPolicyServer(Policy(), "127.0.0.1", int(sys.argv[2]), {"name": "openpi"}).serve_forever()
