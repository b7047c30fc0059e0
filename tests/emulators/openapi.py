"""What an HTTP API is documented to answer, from its OpenAPI document or from a Python client generated from it."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter


class Document:
    """One OpenAPI document, 3.0 or Swagger 2.0: which answer a call may have, and whether this is one."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def check(self, method: str, path: str, status: int, kind: str, body: bytes) -> None:
        template, operation = self._operation(method, path)
        answers = operation["responses"]
        assert str(status) in answers, f"{method} {template} answered {status}; it may be {sorted(answers)}"
        schema = self._schema(answers[str(status)])
        if schema is None or schema.get("type") == "file" or "json" not in kind:
            return
        problems = self.problems(schema, json.loads(body))
        assert not problems, f"{method} {template}: {problems}"

    def calls(self) -> Iterator[tuple[str, str]]:
        for path, methods in self.root["paths"].items():
            for method in methods:
                yield method.upper(), path

    def knows(self, method: str, path: str) -> bool:
        return method.lower() in self.root["paths"].get(path, ())

    def problems(self, schema: Any, value: Any) -> list[str]:
        """What about the value is not as the schema has it."""
        return list(self._problems(schema, value, "answer"))

    def _operation(self, method: str, path: str) -> tuple[str, Any]:
        found = []
        for template, methods in self.root["paths"].items():
            pattern = re.sub(r"\{[^}]+\}", "[^/]+", template)
            if re.fullmatch(pattern, path) and method.lower() in methods:
                found.append((template.count("{"), template, methods[method.lower()]))
        assert found, f"{method} {path} is not in the document"
        _, template, operation = min(found, key=lambda one: one[0])
        return template, operation

    @staticmethod
    def _schema(answer: Any) -> Any:
        if "schema" in answer:
            return answer["schema"]
        return answer.get("content", {}).get("application/json", {}).get("schema")

    def _resolved(self, schema: Any) -> Any:
        while "$ref" in schema:
            target = self.root
            for step in schema["$ref"].removeprefix("#/").split("/"):
                target = target[step]
            schema = target
        return schema

    def _problems(self, schema: Any, value: Any, at: str) -> Iterator[str]:
        schema = self._resolved(schema)
        options = schema.get("oneOf") or schema.get("anyOf") or ()
        if value is None:
            nullable = schema.get("nullable") or schema.get("type") == "null" or schema == {}
            if not nullable and {"type": "null"} not in options:
                yield f"{at} is null"
            return
        for part in schema.get("allOf", ()):
            yield from self._problems(part, value, at)
        if options and all(list(self._problems(option, value, at)) for option in options):
            yield f"{at} is none of what it may be"
        if "enum" in schema and value not in schema["enum"]:
            yield f"{at} is {value!r}"
        types: dict[str, tuple[type, ...]] = {
            "string": (str,),
            "boolean": (bool,),
            "integer": (int,),
            "number": (int, float),
            "array": (list,),
            "object": (dict,),
            "null": (type(None),),
        }
        wanted = types.get(schema.get("type", ""))
        if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
            yield f"{at} is a {type(value).__name__}, not a {schema['type']}"
            return
        if isinstance(value, list) and "items" in schema:
            for number, item in enumerate(value):
                yield from self._problems(schema["items"], item, f"{at}[{number}]")
        if isinstance(value, dict):
            for name in schema.get("required", ()):
                if name not in value:
                    yield f"{at}.{name} is missing"
            known = schema.get("properties", {})
            rest = schema.get("additionalProperties")
            for name, item in value.items():
                if name in known:
                    yield from self._problems(known[name], item, f"{at}.{name}")
                elif isinstance(rest, dict):
                    yield from self._problems(rest, item, f"{at}.{name}")


def from_client(package: str) -> Document:
    """The document again, as far as the client that was generated from it tells: paths, statuses, models."""
    definitions: dict[str, Any] = {}
    for module in _modules(f"{package}.models"):
        for name, model in vars(module).items():
            if inspect.isclass(model) and model.__module__ == module.__name__:
                schema = TypeAdapter(model).json_schema(
                    mode="serialization", ref_template="#/definitions/{model}"
                )
                definitions |= {**schema.pop("$defs", {}), name: schema}
    for schema in definitions.values():
        if "unknown_default_open_api" in schema.get(
            "enum", ()
        ):  # the client's own, for what it does not know
            schema["enum"].remove("unknown_default_open_api")
    paths: dict[str, dict[str, Any]] = {}
    for module in _modules(f"{package}.api"):
        text = inspect.getsource(module)
        # An operation comes in three forms with the same answers, and then as what is sent.
        for answers, method, path in re.findall(_OPERATION, text, re.DOTALL):
            responses = {status: {"schema": _schema(kind)} for status, kind in re.findall(_ANSWER, answers)}
            paths.setdefault(path, {})[method.lower()] = {"responses": responses}
    return Document({"paths": paths, "definitions": definitions})


def _modules(package: str) -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        yield importlib.import_module(found.name)


_OPERATION = (
    r"_without_preload_content\((?:(?!_without_preload_content\().)*?"
    r"_response_types_map[^{]*\{([^}]*)\}(?:(?!_without_preload_content\().)*?"
    r"method='(\w+)',\s*resource_path='([^']+)'"
)
_ANSWER = r"""'(\d+)': ("[^"]*"|None),"""
_PLAIN = {"str": "string", "bool": "boolean", "int": "integer", "float": "number"}


def _schema(kind: str) -> Any:
    """Of a client's name for a type: None for what it does not look into."""
    kind = kind.strip("\"'")
    if kind in ("None", "object", "bytearray"):
        return None
    if listed := re.fullmatch(r"List\[(.*)\]", kind):
        return {"type": "array", "items": _schema(listed[1]) or {}}
    if mapped := re.fullmatch(r"Dict\[\w+,\s*(.*)\]", kind):
        return {"type": "object", "additionalProperties": _schema(mapped[1]) or {}}
    return {"type": _PLAIN[kind]} if kind in _PLAIN else {"$ref": f"#/definitions/{kind}"}
