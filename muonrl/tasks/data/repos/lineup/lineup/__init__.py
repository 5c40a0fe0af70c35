"""Queues, stacks and rings on plain lists."""
