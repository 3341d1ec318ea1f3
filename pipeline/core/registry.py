"""Component registry. A component is a frozen pydantic model: its fields are hyperparameters, its methods the algorithm.

The registry imports every module of a component package and the installed entry points `hemofed.<kind>`. The default of
a class's `name` is the name by which a study file selects it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from pipeline.core.errors import StrategyContractError


class Component(BaseModel):
    """Base of everything that a study file can select by `name`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    description: ClassVar[str] = ""  # in a sentence, for people who do not know machine learning
    name: str

    @classmethod
    def describe_component(cls) -> str:
        """The description; without one the first line of the docstring, of the class or its module."""
        docstring = cls.__doc__ or sys.modules[cls.__module__].__doc__ or "a component without a description"
        return cls.description or docstring.strip().splitlines()[0]


# kind -> package of the built-in components
COMPONENT_PACKAGES: Mapping[str, str] = {
    "strategies": "pipeline.strategies",
    "codecs": "pipeline.codecs",
    "aggregation_rules": "pipeline.aggregation.rules",
    "models": "models.networks",
    "data": "sites.data",
    "partitions": "sites.population.partition",
    "feature_skews": "sites.population.feature_skew",
    "normalizations": "sites.population.color_normalization",
}


def suggest_names(name: str, valid_names: Iterable[str]) -> str:
    """The valid names, with the closest one first: `did you mean 'lr'? valid: batch_size, epochs, lr`."""
    valid_names = sorted(valid_names)
    matches = difflib.get_close_matches(name, valid_names, n=1)
    return (f"did you mean {matches[0]!r}? " if matches else "") + "valid: " + ", ".join(valid_names)


@cache
def registered_components(kind: str) -> Mapping[str, type[Component]]:
    """name -> class, of the built-in components and the installed plugins."""
    package = importlib.import_module(COMPONENT_PACKAGES[kind])
    modules = [package]
    if hasattr(package, "__path__"):
        modules += [
            importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)
        ]
    registered: dict[str, type[Component]] = {}
    for module in modules:
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == module.__name__ and issubclass(cls, Component) and _component_name(cls):
                _register(registered, cls, str(module.__file__))
    for entry_point in entry_points(group=f"hemofed.{kind}"):
        _register(registered, _load_plugin(entry_point), f"plugin {entry_point.value}")
    return dict(sorted(registered.items()))


def _register(registered: dict[str, type[Component]], cls: type[Component], origin: str) -> None:
    if _component_name(cls) in registered:
        raise StrategyContractError(
            f"{origin}: the name {_component_name(cls)!r} is taken by {registered[_component_name(cls)].__module__}; choose another"
        )
    registered[_component_name(cls)] = cls


def _load_plugin(entry_point: EntryPoint) -> type[Component]:
    try:
        cls = entry_point.load()
    except Exception as error:  # a plugin may raise any exception on import
        raise StrategyContractError(
            f"the plugin {entry_point.value} cannot be loaded ({error}); repair or uninstall it"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Component) and _component_name(cls)):
        raise StrategyContractError(
            f"the plugin {entry_point.value} is not a component with a `name`; see docs/add-a-strategy.md"
        )
    return cls


def plugin_versions(components: Iterable[Component]) -> dict[str, str]:
    """Distribution -> version of the plugins that define these components; part of a study's hash."""
    modules = {type(component).__module__ for component in components}
    return {
        entry_point.dist.name: entry_point.dist.version
        for kind in COMPONENT_PACKAGES
        for entry_point in entry_points(group=f"hemofed.{kind}")
        if entry_point.dist is not None and entry_point.module in modules
    }


def _component_name(cls: type[Component]) -> str:
    default = cls.model_fields["name"].default
    return default if isinstance(default, str) else ""


class ComponentChoice:
    """`Annotated[Strategy, ComponentChoice("strategies")]`: a table with a `name`, or the name alone."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._validate_choice,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda v: v.model_dump(mode="json", exclude_none=True)
            ),
        )

    def _validate_choice(self, value: object) -> Component:
        if isinstance(value, Component):
            return value
        table = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
            raise PydanticCustomError(
                "no_name", "needs a `name`; {valid}", {"valid": suggest_names("", registered_components(self.kind))}
            )
        cls = registered_components(self.kind).get(table["name"])
        if cls is None:
            raise PydanticCustomError(
                "unknown_name",
                "{given} is not known; {valid}",
                {"given": repr(table["name"]), "valid": suggest_names(table["name"], registered_components(self.kind))},
            )
        return cls.model_validate(dict(table))
