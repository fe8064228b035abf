"""What an API server keeps: objects, one growing version, what happened since, finalisers and owners. No HTTP here.

All methods are safe to call from several threads; what they return is a copy.
"""

from __future__ import annotations

import base64
import binascii
import copy
import itertools
import random
import string
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tests.job.backends.kube.patching import PatchError, merged, patched
from tests.job.backends.kube.selectors import Matches

Object = dict[str, Any]
Owner = Mapping[str, Any]
Owners = list[Owner]  # a name of its own: the store has a method `list`

FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
_FIXED = ("name", "namespace", "uid", "creationTimestamp", "deletionTimestamp", "generation", "resourceVersion")
_PLAIN = frozenset({"secrets", "configmaps", "events", "serviceaccounts", "leases", "endpoints"})  # without a status


class Refused(Exception):
    """An answer that is a Status object."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message


KINDS = {
    "rayjobs": "RayJob",
    "rayclusters": "RayCluster",
    "pods": "Pod",
    "secrets": "Secret",
    "services": "Service",
    "events": "Event",
    "configmaps": "ConfigMap",
    "namespaces": "Namespace",
    "jobs": "Job",
}


def kind_of(plural: str) -> str:
    return KINDS.get(plural) or plural.capitalize()


class Kind(NamedTuple):
    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


class Key(NamedTuple):
    group: str
    plural: str
    namespace: str  # "" for what lives in none
    name: str


@dataclass(frozen=True)
class Moment:
    """One change. after: None when the object is gone; its last state, with the version of its end, is `last`."""

    version: int
    key: Key
    before: Object | None
    after: Object | None
    last: Object


class Store:
    """namespaces: those that exist. check: called with an object that is to be kept; may change it or raise Refused."""

    def __init__(self, namespaces: Sequence[str] = ("default", "corral")) -> None:
        self.lock = threading.RLock()
        self.version = 100
        self.floor = 100  # nobody knows any more what happened up to here
        self.history: list[Moment] = []
        self.gc_held = False
        self.checks: list[Callable[[Kind, Object], None]] = []
        self.listeners: list[Callable[[Moment], None]] = []
        self._objects: dict[Key, Object] = {}
        for name in namespaces:
            self.create(Kind("", "v1", "namespaces"), "", {"metadata": {"name": name}, "kind": "Namespace"})

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        with self.lock:
            return copy.deepcopy(self._found(kind, namespace, name))

    def list(self, kind: Kind, namespace: str | None, matches: Matches, back: int = 0) -> tuple[list[Object], int]:
        """Sorted by namespace and name, and the version of that moment. back: as it was so many versions ago."""
        with self.lock:
            version = max(self.floor, self.version - back)
            then = dict(self._objects)
            for moment in reversed(self.history):
                if moment.version > version:
                    then.pop(moment.key, None)
                    if moment.before is not None:
                        then[moment.key] = moment.before
            found = [then[key] for key in sorted(then) if self._is(key, kind, namespace)]
            return [copy.deepcopy(thing) for thing in found if matches(thing)], version

    def since(self, version: int, kind: Kind, namespace: str | None, matches: Matches) -> Iterator[tuple[str, Object]]:
        """(type, object) of every change after a version, as a watch shows them. Raises Refused (410)."""
        with self.lock:
            if version < self.floor:
                raise Refused(410, "Expired", f"too old resource version: {version} ({self.floor})")
            news = [one for one in self.history if one.version > version and self._is(one.key, kind, namespace)]
        for one in news:
            before = one.before is not None and matches(one.before)
            after = one.after is not None and matches(one.after)
            if before or after:
                shown = "ADDED" if not before else "MODIFIED" if after else "DELETED"
                yield shown, copy.deepcopy(one.last)

    def compact(self) -> None:
        """Forget what happened up to now: every older watch is answered with 410."""
        with self.lock:
            self.history.clear()
            self.floor = self.version

    def create(self, kind: Kind, namespace: str, body: Object) -> Object:
        with self.lock:
            thing = copy.deepcopy(body)
            about = thing.setdefault("metadata", {})
            name = about.get("name") or _generated(about.get("generateName"))
            if not name:
                raise Refused(422, "Invalid", "metadata.name: Required value: name or generateName is required")
            if about.get("resourceVersion"):
                raise Refused(400, "BadRequest", "resourceVersion should not be set on objects to be created")
            if about.get("namespace", namespace) != namespace:
                raise Refused(
                    400, "BadRequest", "the namespace of the object does not match the namespace on the request"
                )
            if namespace and Key("", "namespaces", "", namespace) not in self._objects:
                raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
            key = Key(kind.group, kind.plural, namespace, name)
            if key in self._objects:
                raise Refused(409, "AlreadyExists", f'{kind} "{name}" already exists')
            if kind.plural not in _PLAIN:
                about["generation"] = 1
                if kind.group:
                    thing.pop("status", None)
            about |= {"name": name, "uid": str(uuid.uuid4()), "creationTimestamp": _now()}
            about |= {"namespace": namespace} if namespace else {}
            about.pop("deletionTimestamp", None)
            self._keep(kind, thing)
            self._commit(key, None, thing)
            self._collect()
            return copy.deepcopy(self._objects.get(key, thing))

    def replace(self, kind: Kind, namespace: str, name: str, body: Object, subresource: str = "") -> Object:
        with self.lock:
            old = self._found(kind, namespace, name)
            about = body.get("metadata") or {}
            if about.get("name") != name:
                raise Refused(400, "BadRequest", f"the name of the object ({about.get('name')}) does not match {name}")
            if kind.group and not about.get("resourceVersion"):
                raise Refused(422, "Invalid", "metadata.resourceVersion: must be specified for an update")
            return self._update(kind, old, copy.deepcopy(body), subresource)

    def patch(self, kind: Kind, namespace: str, name: str, patch: Any, subresource: str = "") -> Object:
        """A list is a JSON patch, everything else a merge patch."""
        with self.lock:
            old = self._found(kind, namespace, name)
            try:
                new = patched(old, patch) if isinstance(patch, list) else merged(old, patch)
            except PatchError as error:
                raise Refused(422, "Invalid", f"the server rejected our request: {error}") from None
            return self._update(kind, old, new, subresource)

    def delete(self, kind: Kind, namespace: str, name: str, options: Mapping[str, Any] | None = None) -> Object:
        """The object as it is after the call, or as it was at its end."""
        with self.lock:
            thing = self._found(kind, namespace, name)
            options = options or {}
            for field, wanted in (options.get("preconditions") or {}).items():
                if thing["metadata"].get(field) != wanted:
                    raise Refused(409, "Conflict", f"Precondition failed: {field} in precondition: {wanted}")
            key = Key(kind.group, kind.plural, namespace, name)
            self._end(key, options.get("propagationPolicy") or "Background")
            self._collect()
            return copy.deepcopy(self._objects.get(key, thing))

    @staticmethod
    def _is(key: Key, kind: Kind, namespace: str | None) -> bool:
        return key.group == kind.group and key.plural == kind.plural and namespace in (None, key.namespace)

    def _found(self, kind: Kind, namespace: str, name: str) -> Object:
        thing = self._objects.get(Key(kind.group, kind.plural, namespace, name))
        if thing is None:
            raise Refused(404, "NotFound", f'{kind} "{name}" not found')
        return thing

    def _update(self, kind: Kind, old: Object, new: Object, subresource: str) -> Object:
        was, about = old["metadata"], new.setdefault("metadata", {})
        for field in ("resourceVersion", "uid"):
            if about.get(field) and about[field] != was[field]:
                said = "the object has been modified; please apply your changes to the latest version and try again"
                raise Refused(409, "Conflict", f'Operation cannot be fulfilled on {kind} "{was["name"]}": {said}')
        if subresource == "status":
            new = copy.deepcopy(old) | {"status": new.get("status") or {}}
        elif kind.plural not in _PLAIN:
            new.pop("status", None)
            new |= {"status": copy.deepcopy(old["status"])} if "status" in old else {}
        new["metadata"] |= {field: was[field] for field in _FIXED if field in was}
        added = set(new["metadata"].get("finalizers") or ()) - set(was.get("finalizers") or ())
        if added and was.get("deletionTimestamp"):
            said = "no new finalizers can be added if the object is being deleted"
            raise Refused(422, "Invalid", f"metadata.finalizers: Forbidden: {said}: {sorted(added)}")
        self._keep(kind, new)
        if new == old:
            return copy.deepcopy(old)
        if "generation" in was and _wanted(new) != _wanted(old):
            new["metadata"]["generation"] = was["generation"] + 1
        key = Key(kind.group, kind.plural, was.get("namespace", ""), was["name"])
        self._commit(key, old, new)
        self._finish(key)
        self._collect()
        return copy.deepcopy(self._objects.get(key, new))

    def _keep(self, kind: Kind, thing: Object) -> None:
        thing |= {"apiVersion": kind.api_version, "kind": thing.get("kind") or kind_of(kind.plural)}
        if kind.plural == "secrets":
            _secret(thing)
        for check in self.checks:
            check(kind, thing)

    def _commit(self, key: Key, before: Object | None, after: Object | None) -> None:
        self.version += 1
        last = copy.deepcopy(after if after is not None else before)
        assert last is not None
        last["metadata"]["resourceVersion"] = str(self.version)
        if after is None:
            del self._objects[key]
        else:
            self._objects[key] = last
        moment = Moment(self.version, key, before, None if after is None else last, last)
        self.history.append(moment)
        for listener in self.listeners:
            listener(moment)

    def _end(self, key: Key, propagation: str) -> None:
        """Begin the deletion of one object, and finish it when nothing holds it."""
        old = self._objects[key]
        if old["metadata"].get("deletionTimestamp"):
            return
        new = copy.deepcopy(old)
        about = new["metadata"]
        extra = {"Foreground": [FOREGROUND], "Orphan": [ORPHAN]}.get(propagation, [])
        if held := [*(about.get("finalizers") or []), *extra]:
            about |= {"finalizers": held, "deletionTimestamp": _now(), "deletionGracePeriodSeconds": 0}
            about |= {"generation": about["generation"] + 1} if "generation" in about else {}
            self._commit(key, old, new)
        else:
            self._commit(key, old, None)

    def _finish(self, key: Key) -> None:
        thing = self._objects[key]
        if thing["metadata"].get("deletionTimestamp") and not thing["metadata"].get("finalizers"):
            self._commit(key, thing, None)

    def _release(self, key: Key, finaliser: str) -> None:
        old = self._objects[key]
        new = copy.deepcopy(old)
        new["metadata"]["finalizers"].remove(finaliser)
        self._commit(key, old, new)
        self._finish(key)

    def collect(self) -> None:
        """Do what the garbage collector left undone while it was held."""
        with self.lock:
            self._collect()

    def _collect(self) -> None:
        """The garbage collector: dependants of what is gone, and of what waits for them in the foreground."""
        again = not self.gc_held
        while again:
            again = False
            for key in list(self._objects):
                again = self._collect_one(key) or again

    def _collect_one(self, key: Key) -> bool:
        thing = self._objects.get(key)
        if thing is None:
            return False
        about = thing["metadata"]
        finalisers = about.get("finalizers") or []
        if about.get("deletionTimestamp") and ORPHAN in finalisers:
            self._orphan(about["uid"])
            self._release(key, ORPHAN)
            return True
        if about.get("deletionTimestamp") and FOREGROUND in finalisers:
            if any(owner.get("blockOwnerDeletion") for owner in self._references(about["uid"])):
                return False
            self._release(key, FOREGROUND)
            return True
        if about.get("deletionTimestamp") or not about.get("ownerReferences"):
            return False
        owners = [self._by_uid(owner["uid"]) for owner in about["ownerReferences"]]
        living = [owner["metadata"] for owner in owners if owner is not None]
        if living and not all(FOREGROUND in (owner.get("finalizers") or []) for owner in living):
            return False
        self._end(key, "Foreground" if living and any(self._references(about["uid"])) else "Background")
        return True

    def _orphan(self, uid: str) -> None:
        for key, thing in list(self._objects.items()):
            owners = thing["metadata"].get("ownerReferences") or []
            if any(owner["uid"] == uid for owner in owners):
                new = copy.deepcopy(thing)
                new["metadata"]["ownerReferences"] = [owner for owner in owners if owner["uid"] != uid]
                self._commit(key, thing, new)

    def _by_uid(self, uid: str) -> Object | None:
        return next((thing for thing in self._objects.values() if thing["metadata"]["uid"] == uid), None)

    def _references(self, uid: str) -> Owners:
        all_owners = (thing["metadata"].get("ownerReferences") or [] for thing in self._objects.values())
        return [owner for owner in itertools.chain.from_iterable(all_owners) if owner["uid"] == uid]


def _wanted(thing: Object) -> Object:
    return {key: value for key, value in thing.items() if key not in ("metadata", "status")}


def _generated(prefix: str | None) -> str | None:
    return prefix + "".join(random.choices(string.ascii_lowercase + string.digits, k=5)) if prefix else None


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _secret(thing: Object) -> None:
    data = thing.setdefault("data", {})
    for name, text in (thing.pop("stringData", None) or {}).items():
        data[name] = base64.b64encode(text.encode()).decode()
    for name, value in data.items():
        try:
            base64.b64decode(value, validate=True)
        except (binascii.Error, TypeError):
            raise Refused(400, "BadRequest", f"data.{name}: illegal base64 data") from None
    thing.setdefault("type", "Opaque")
