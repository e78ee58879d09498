"""Environments of others as suites: robosuite's by name, and Gymnasium's."""

from sim.adapters.gymnasium_suite import GymnasiumConfig, GymnasiumSuite
from sim.adapters.robosuite_suite import RobosuiteConfig, RobosuiteSuite

__all__ = ["GymnasiumConfig", "GymnasiumSuite", "RobosuiteConfig", "RobosuiteSuite"]
