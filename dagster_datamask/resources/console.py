"""What a run prints: the message, its step and its level, on stderr, without Dagster's long prefix."""

import logging
import sys

import dagster as dg


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        meta = getattr(record, "dagster_meta", {})
        step = meta.get("step_key")
        message = meta.get("orig_message") or record.getMessage()
        level = "" if record.levelno <= logging.INFO else f" {record.levelname}"
        where = f"{step}: " if step and step not in message else ""
        return f"{self.formatTime(record, '%H:%M:%S')}{level} {where}{message}"


@dg.logger({"log_level": dg.Field(str, default_value="INFO")}, description="One short line per message on stderr.")
def console(init_context: dg.InitLoggerContext) -> logging.Logger:
    """A logger of the level asked for; INFO shows progress, DEBUG every Dagster event."""
    logger = logging.Logger("datamask", level=init_context.logger_config["log_level"])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line())
    logger.addHandler(handler)
    return logger
