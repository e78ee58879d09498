"""Run in LeRobot's environment: reads a dataset with LeRobot's reader; prints one JSON line.

lerobot_dataset_client.py DATASET REPO_ID CAMERA
"""

import json
import sys

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset


def main() -> None:
    root, repo_id, camera = sys.argv[1:]
    dataset = LeRobotDataset(repo_id, root=root)
    rows = [dataset[i] for i in range(len(dataset))]
    columns = ("action", "action.sent", "observation.state", "timestamp", "episode_index", "next.success")
    print(
        json.dumps(
            {
                **{name: [np.asarray(row[name]).tolist() for row in rows] for name in columns},
                # Four corners of each picture, in 0..255.
                "corners": [
                    np.asarray(row[f"observation.images.{camera}"][:, ::7, ::9] * 255).round().tolist() for row in rows
                ],
                "tasks": [row["task"] for row in rows],
                "fps": dataset.fps,
                "episodes": dataset.num_episodes,
                "robot": dataset.meta.robot_type,
                "names": dataset.meta.features["action"]["names"],
                "has_stats": "mean" in dataset.meta.stats["action"],
            }
        )
    )


if __name__ == "__main__":
    main()
