"""Forwards to `trimtab.runs.tracking_file` until every import names that module."""

from trimtab.runs.tracking_file import TRACKING as TRACKING
from trimtab.runs.tracking_file import About as About
from trimtab.runs.tracking_file import Tracking as Tracking
from trimtab.runs.tracking_file import shipping as shipping
