"""Servers that are each wrong in one thing, to show that the suite can fail.

Each is the small server with one rule broken, and names the check that must catch it. To run one on stdio: `python -m
tests.conformance.wrong_servers NAME`; the one named `Server` is correct.
"""

import contextlib
import json
import os
import signal
import struct
import sys
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from tests.conformance.small_server import METHODS, Params, Record, Refused, Server

WRONG: dict[str, type[Server]] = {}
CAUGHT_BY: dict[str, str] = {}
BINDINGS: dict[str, str] = {}


class Wrong(Server):
    """Registers every derived class under the check that must catch it, with the binding that this needs."""

    def __init_subclass__(cls, *, caught_by: str, binding: str = "process") -> None:
        WRONG[cls.__name__] = cls
        CAUGHT_BY[cls.__name__] = caught_by
        BINDINGS[cls.__name__] = binding


def without(*capabilities: str) -> tuple[str, ...]:
    return tuple(name for name in METHODS if name not in capabilities)


# --- core


class PretendsAnyVersion(Wrong, caught_by="core.no_other_version_is_pretended"):
    def describe(self, params: Params) -> Record:
        return {**super().describe(params), "protocol": params.get("protocol", "a2m/0.1")}


class InventsACapability(Wrong, caught_by="core.capabilities_have_names_of_the_protocol"):
    def describe(self, params: Params) -> Record:
        described = super().describe(params)
        return {**described, "capabilities": [*described["capabilities"], "graph"]}


class ForgetsToListAMethod(Wrong, caught_by="core.methods_are_those_of_the_capabilities"):
    def describe(self, params: Params) -> Record:
        described = super().describe(params)
        return {**described, "methods": [name for name in described["methods"] if name != "memory/fetch"]}


class DeclaresWhatItLacks(Wrong, caught_by="core.every_method_that_is_listed_is_there"):
    def fetch(self, params: Params) -> Record:
        raise Refused(-32601, "not there yet")


class RejectsUnknownParameters(Wrong, caught_by="core.unknown_parameters_do_not_trouble_a_read"):
    def carry_out(self, method: str, params: Any) -> Record:
        if "future" in params:
            raise Refused(-32602, "what is future?")
        return super().carry_out(method, params)


class RejectsUnknownFields(Wrong, caught_by="core.unknown_parameters_do_not_trouble_a_write"):
    def draft(self, given: Any, params: Params) -> Record:
        if "xUnheardOf" in given:
            raise Refused(-32602, "what is xUnheardOf?")
        return super().draft(given, params)


class TakesMoreRecordsThanItSays(Wrong, caught_by="core.the_limit_of_records_is_enforced"):
    def describe(self, params: Params) -> Record:
        return {**super().describe(params), "limits": {**self.limits, "max_records_per_call": 50}}


class TakesLongerContentThanItSays(Wrong, caught_by="core.the_limit_of_content_is_enforced"):
    def describe(self, params: Params) -> Record:
        return {**super().describe(params), "limits": {**self.limits, "max_content_length": 5000}}


class CutsALimitThatIsTooHigh(Wrong, caught_by="core.the_limit_of_recall_is_enforced"):
    def recall_limit(self, params: Params) -> int:
        return min(self.limit(params) or 8, self.limits["max_recall_limit"])


class WritesHalfABatch(Wrong, caught_by="core.a_batch_with_a_mistake_in_it_writes_nothing"):
    def remember(self, params: Params) -> Record:
        try:
            return super().remember(params)
        except Refused:
            for record in params["records"] if isinstance(params.get("records"), list) else ():
                super().remember({**params, "records": [record]})
            raise


class IgnoresTheQuery(Wrong, caught_by="core.recall_finds_what_it_is_asked_for"):
    def score(self, record: Record, params: Params) -> float:
        return 0.5


class WantsAQuery(Wrong, caught_by="core.recall_without_a_query_is_no_error"):
    def recall(self, params: Params) -> Record:
        if not params.get("query"):
            raise Refused(-32602, "what shall be recalled?")
        return super().recall(params)


class PutsTheWorstFirst(Wrong, caught_by="core.scores_descend"):
    def ranked(self, scored: list[tuple[float, Record]]) -> list[tuple[float, Record]]:
        return [(1 / (place + 2), record) for place, (_, record) in enumerate(super().ranked(scored))][::-1]


class ScoresWithoutBounds(Wrong, caught_by="core.scores_are_between_0_and_1"):
    def score(self, record: Record, params: Params) -> float:
        return 12 * super().score(record, params)


class ShowsTheNewestFirst(Wrong, caught_by="core.timeline_ascends"):
    def window(self, ordered: list[Record], limit: int | None) -> list[Record]:
        return super().window(ordered, limit)[::-1]


class TakesTheOldest(Wrong, caught_by="core.timeline_with_a_limit_takes_the_newest"):
    def window(self, ordered: list[Record], limit: int | None) -> list[Record]:
        return ordered[:limit]


class RanksItsTimeline(Wrong, caught_by="core.timeline_does_not_care_what_is_recalled"):
    def window(self, ordered: list[Record], limit: int | None) -> list[Record]:
        return super().window(sorted(ordered, key=lambda record: -record["access_count"]), limit)


class KnowsNoAnyOf(Wrong, caught_by="core.where_selects_by_field_and_by_metadata"):
    def matches(self, record: Record, name: str, wanted: Any) -> bool:
        return bool(record.get(name, record.get("metadata", {}).get(name)) == wanted)


class ForgetsEverythingOnRequest(Wrong, caught_by="core.forget_without_a_selector_is_refused"):
    def forget(self, params: Params) -> Record:
        return super().forget({"ids": [record["id"] for record in self.records], **params})


class ForgetsOnlyInItsAnswer(Wrong, caught_by="core.forget_removes_by_id"):
    def forget(self, params: Params) -> Record:
        kept = list(self.records)
        answer = super().forget(params)
        self.records = kept
        return answer


# --- records


class DropsDeepMetadata(Wrong, caught_by="records.metadata_comes_back_as_written"):
    def draft(self, given: Any, params: Params) -> Record:
        draft = super().draft(given, params)
        flat = {name: value for name, value in draft.get("metadata", {}).items() if not isinstance(value, dict | list)}
        return {**draft, "metadata": flat}


class TrimsContent(Wrong, caught_by="records.content_role_and_group_come_back_as_written"):
    def draft(self, given: Any, params: Params) -> Record:
        draft = super().draft(given, params)
        return {**draft, "content": draft["content"].strip()}


class CutsContent(Wrong, caught_by="records.content_role_and_group_come_back_as_written"):
    def draft(self, given: Any, params: Params) -> Record:
        draft = super().draft(given, params)
        return {**draft, "content": draft["content"][:2000]}


class CutsTextInMetadata(Wrong, caught_by="records.metadata_comes_back_as_written"):
    def draft(self, given: Any, params: Params) -> Record:
        draft = super().draft(given, params)
        metadata = {
            name: value[:60] if isinstance(value, str) else value for name, value in draft.get("metadata", {}).items()
        }
        return {**draft, "metadata": metadata}


class WritesARepeatedIdTwice(Wrong, caught_by="records.a_repeated_write_makes_no_second_record"):
    def write(self, draft: Record) -> str:
        there = self.with_id(draft.get("id"))
        if there is not None:
            self.records.append({**there})
            return str(there["id"])
        return super().write(draft)


class ReplacesChosenIds(Wrong, caught_by="records.a_chosen_id_is_kept"):
    def write(self, draft: Record) -> str:
        return super().write({name: value for name, value in draft.items() if name != "id"})


class CountsSeconds(Wrong, caught_by="records.timestamps_are_utc_with_milliseconds"):
    def now(self) -> Any:
        return time.time()


class DropsTheTier(Wrong, caught_by="records.a_tier_without_tiers_is_refused"):
    capabilities = without("tiers")

    def check_tier_on_write(self, tier: str) -> None:
        """Accept every tier."""

    def draft(self, given: Any, params: Params) -> Record:
        return super().draft({name: value for name, value in given.items() if name != "tier"}, params)


class RefusesSomeWrites(Wrong, caught_by="records.no_write_is_refused_as_if_the_server_were_read_only"):
    def draft(self, given: Any, params: Params) -> Record:
        if isinstance(given, dict) and given.get("role") == "system":
            raise Refused(-32004, "not from the system")
        return super().draft(given, params)


class StumblesOverForeignFields(Wrong, caught_by="records.fields_of_capabilities_that_are_not_declared_are_ignored"):
    capabilities = without("keys")

    def draft(self, given: Any, params: Params) -> Record:
        if isinstance(given, dict) and "key" in given:
            raise Refused(-32003, "keys is not declared")
        return super().draft(given, params)


# --- read-only


class ForgetsThoughReadOnly(Wrong, caught_by="read_only.remember_and_forget_are_both_refused"):
    read_only = True

    def forget(self, params: Params) -> Record:
        return {"forgotten": 0}


class LetsChosenIdsIn(Wrong, caught_by="read_only.every_write_is_refused"):
    def remember(self, params: Params) -> Record:
        if not any("id" in record for record in params["records"]):
            raise Refused(-32004, "read-only")
        return super().remember(params)

    def forget(self, params: Params) -> Record:
        raise Refused(-32004, "read-only")


class SummarizesThoughReadOnly(Wrong, caught_by="read_only.summarize_is_refused"):
    read_only = True

    def summarize(self, params: Params) -> Record:
        return {"records": [], "read": 0, "written": 0}


# --- errors


class KnowsNoOtherCapabilities(Wrong, caught_by="errors.methods_of_undeclared_capabilities_say_so"):
    capabilities = without("summarize", "events")

    def not_declared(self, capability: str) -> Refused:
        return Refused(-32601, "no such method")


class TakesBatches(Wrong, caught_by="errors.a_batch_is_refused"):
    def answer_message(self, message: Any) -> bytes | None:
        if isinstance(message, list) and message:
            return super().answer_message(message[0])
        return super().answer_message(message)


class CallsEverythingInvalid(Wrong, caught_by="errors.malformed_json_is_a_parse_error"):
    def error(self, id: Any, code: int, text: str) -> bytes:
        return super().error(id, -32600 if code == -32700 else code, text)


class AnswersWithNumbers(Wrong, caught_by="errors.an_answer_has_the_id_of_its_request"):
    def rendered(self, message: Record) -> bytes:
        id = message.get("id")
        return super().rendered({**message, "id": int(id)} if isinstance(id, str) and id.isdigit() else message)


class AnswersNotifications(Wrong, caught_by="errors.a_notification_is_not_answered", binding="stdio"):
    def answer_message(self, message: Any) -> bytes | None:
        return super().answer_message({"id": None, **message} if isinstance(message, dict) else message)


class DropsNotifications(Wrong, caught_by="errors.a_notification_is_carried_out"):
    def answer_message(self, message: Any) -> bytes | None:
        if isinstance(message, dict) and "id" not in message and "method" in message:
            return None
        return super().answer_message(message)


# --- tiers and salience


class CountsNothing(Wrong, caught_by="tiers.counts_count_what_is_there"):
    def count(self, records: list[Record], tier: str) -> int:
        return 0


class HasKindsOfItsOwn(Wrong, caught_by="tiers.a_kind_is_one_of_the_four"):
    tiers: ClassVar[dict[str, Record]] = {**Server.tiers, "attic": {"kind": "archive"}}


class WritesWhereItLikes(Wrong, caught_by="tiers.a_record_goes_to_the_tier_it_names"):
    def draft(self, given: Any, params: Params) -> Record:
        return {**super().draft(given, params), "tier": "working"}


class CallsAnUnknownTierInvalid(Wrong, caught_by="tiers.a_write_to_an_unknown_tier_fails"):
    def check_tier(self, tier: Any) -> None:
        if tier not in self.tiers:
            raise Refused(-32602, "no such tier")


class FailsOnUnknownIds(Wrong, caught_by="tiers.promote_moves_and_counts"):
    def promote(self, params: Params) -> Record:
        if any(self.with_id(id) is None for id in params.get("ids", ())):
            raise Refused(-32001, "no such record")
        return super().promote(params)


class TearsGroupsApart(Wrong, caught_by="tiers.a_promoted_group_stays_together"):
    def together(self, record: Record) -> list[Record]:
        return [record]


class SpillsRecordByRecord(Wrong, caught_by="tiers.pressure_moves_groups_whole"):
    def spill(self) -> int:
        for session in {record.get("session") for record in self.records}:
            for record in self.held(session)[: -self.tiers["working"]["capacity"] + 1]:
                record["tier"] = "episodic"
        return 0


class LetsSessionsPushEachOtherOut(Wrong, caught_by="tiers.a_busy_session_does_not_push_out_a_quiet_one"):
    def held(self, session: str | None) -> list[Record]:
        return [record for record in self.records if record["tier"] == "working"]


class OnlySaysItReinforces(Wrong, caught_by="salience.reinforce_raises_salience"):
    def reinforce(self, params: Params) -> Record:
        return {"reinforced": len(self.wanted(params, "ids", list))}


# --- scopes


class ShowsEverythingToEverybody(Wrong, caught_by="scopes.nobody_sees_another_s_records"):
    def visible(self, params: Params) -> list[Record]:
        return list(self.records)


class LetsAnybodyForget(Wrong, caught_by="scopes.nobody_deletes_another_s_records"):
    def forgettable(self, params: Params) -> list[Record]:
        return self.selected({**params, "owner": None})


class BelievesTheOwner(Wrong, caught_by="scopes.an_owner_that_is_named_is_not_believed", binding="http"):
    def asserted(self, params: Params) -> Params:
        return {"owner": params.get("owner") or self.principal}


# --- sessions


class ForgetsTheSession(Wrong, caught_by="sessions.a_session_comes_back"):
    def shown(self, record: Record, params: Params) -> Record:
        return {name: value for name, value in super().shown(record, params).items() if name != "session"}


class ListsTheNamelessSession(Wrong, caught_by="sessions.records_without_a_session_belong_to_none"):
    def session_list(self, params: Params) -> Record:
        listed = super().session_list(params)["sessions"]
        return {"sessions": [*listed, {"session": "", "records": len(self.records)}]}


class CloseDestroys(Wrong, caught_by="sessions.closing_destroys_nothing"):
    def session_close(self, params: Params) -> Record:
        answer = super().session_close(params)
        self.records = [record for record in self.records if record.get("session") != params["session"]]
        return answer


class CloseWaits(Wrong, caught_by="sessions.a_closed_session_leaves_the_working_tier"):
    def session_close(self, params: Params) -> Record:
        session = self.wanted(params, "session", str)
        return {**self.consolidated(0), "closed": session, "flushed": 0}


class CloseFailsOnUnknown(Wrong, caught_by="sessions.closing_an_unknown_session_does_nothing"):
    def session_close(self, params: Params) -> Record:
        if params.get("session") and not self.selected({"where": {"session": params["session"]}}):
            raise Refused(-32001, "no such session")
        return super().session_close(params)


class CloseMakesProcedures(Wrong, caught_by="sessions.closing_leaves_procedural_memory_alone"):
    def session_close(self, params: Params) -> Record:
        answer = super().session_close(params)
        for record in self.selected({"where": {"session": params["session"]}}):
            record["tier"] = "procedural"
        return answer


# --- keys


class AppendsToKeys(Wrong, caught_by="keys.an_occupied_key_is_replaced"):
    def holder(self, draft: Record) -> Record | None:
        return None


class SharesKeysAmongOwners(Wrong, caught_by="keys.a_key_is_each_owner_s_own"):
    def holder(self, draft: Record) -> Record | None:
        key = draft.get("key")
        return next((record for record in self.records if key is not None and record.get("key") == key), None)


class TakesAPrefixForAKey(Wrong, caught_by="keys.a_prefix_selects_what_is_at_it_and_beneath"):
    def is_beneath(self, key: str, prefix: str) -> bool:
        return key == prefix


class FailsOnUnusedKeys(Wrong, caught_by="keys.an_unused_key_is_null"):
    def nothing_at(self, key: str) -> Record | None:
        raise Refused(-32001, "no such key")


# --- embeddings and external


class RoundsVectors(Wrong, caught_by="embeddings.a_vector_comes_back_exactly"):
    def write(self, draft: Record) -> str:
        vector = draft.get("embedding")
        if vector is not None:
            draft["embedding"] = list(struct.unpack(f"{len(vector)}f", struct.pack(f"{len(vector)}f", *vector)))
        return super().write(draft)


class AlwaysShowsVectors(Wrong, caught_by="embeddings.vectors_come_back_only_where_they_are_asked_for"):
    def shown(self, record: Record, params: Params) -> Record:
        return super().shown(record, {**params, "embeddings": True})


class TakesAnyWidth(Wrong, caught_by="embeddings.another_width_is_refused"):
    def check_width(self, vector: list[float]) -> None:
        """Accept every width."""

    def score(self, record: Record, params: Params) -> float:
        return super().score(record, {**params, "embedding": None})


class TidiesUris(Wrong, caught_by="external.a_uri_comes_back_unchanged"):
    def write(self, draft: Record) -> str:
        if "uri" in draft:
            draft["uri"] = draft["uri"].lower()
        return super().write(draft)


class WantsContent(Wrong, caught_by="external.a_uri_may_be_without_words"):
    def draft(self, given: Any, params: Params) -> Record:
        if isinstance(given, dict) and not given.get("content"):
            raise Refused(-32602, "content is required")
        return super().draft(given, params)


class FetchesUris(Wrong, caught_by="external.a_uri_is_never_fetched"):
    def write(self, draft: Record) -> str:
        if str(draft.get("uri")).startswith("http://127.0.0.1"):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(draft["uri"], timeout=0.1)
        return super().write(draft)


# --- events


class TellsTheWholeStory(Wrong, caught_by="events.a_first_poll_begins_now"):
    def events(self, params: Params) -> Record:
        return super().events({"cursor": str(self.log_begins), **params})


class TellsOfEveryForgottenRecord(Wrong, caught_by="events.a_forget_is_one_event"):
    def tell_forgotten(self, gone: list[Record]) -> None:
        for record in gone:
            super().tell_forgotten([record])


class TellsTheLastEventAgain(Wrong, caught_by="events.polls_see_every_event_once"):
    def events(self, params: Params) -> Record:
        result = super().events(params)
        again = int(result["cursor"]) - (1 if len(result["events"]) > 1 else 0)
        return {**result, "cursor": str(again), "more": result["more"]}


class KeepsQuietAboutTheGap(Wrong, caught_by="events.a_cursor_from_before_the_log_answers_reset"):
    def reset(self, cursor: int) -> Record:
        return {}


class IgnoresKinds(Wrong, caught_by="events.kinds_choose_among_events"):
    def told(self, params: Params, owner: str | None, event: Record) -> bool:
        return super().told({**params, "kinds": None}, owner, event)


class TellsEverybodyEverything(Wrong, caught_by="events.another_owner_s_events_are_not_told"):
    def told(self, params: Params, owner: str | None, event: Record) -> bool:
        return super().told({**params, "owner": None}, owner, event)


class TellsOfEveryMove(Wrong, caught_by="events.the_end_of_a_session_is_one_event"):
    def session_close(self, params: Params) -> Record:
        for record in self.held(self.wanted(params, "session", str)):
            self.tell_written(record)
        return super().session_close(params)


class PushesTooEarly(Wrong, caught_by="events.events_are_pushed_after_the_response", binding="stdio"):
    def lines_for(self, line: bytes) -> Iterable[bytes]:
        return list(super().lines_for(line))[::-1]


class PushesUnasked(Wrong, caught_by="events.nothing_is_pushed_before_a_subscription", binding="stdio"):
    def notifications(self) -> list[bytes]:
        self.subscription = self.subscription or {}
        return super().notifications()


class NeverStopsPushing(Wrong, caught_by="events.nothing_is_pushed_after_unsubscribing", binding="stdio"):
    def events_unsubscribe(self, params: Params) -> Record:
        return {"subscribed": False}


class PushesWhateverTheKind(Wrong, caught_by="events.only_the_kinds_subscribed_to_are_pushed", binding="stdio"):
    def events_subscribe(self, params: Params) -> Record:
        return super().events_subscribe({**params, "kinds": None})


# --- summaries and text


class SummarizesEverything(Wrong, caught_by="summarize.summarize_wants_a_selector"):
    def summarize(self, params: Params) -> Record:
        return super().summarize({"where": {}, **params})


class SummarizesAway(Wrong, caught_by="summarize.summarize_leaves_its_sources"):
    def summarize(self, params: Params) -> Record:
        sources = self.selected(params)
        answer = super().summarize(params)
        self.records = [record for record in self.records if record not in sources]
        return answer


class OnlyReturnsItsSummary(Wrong, caught_by="summarize.a_summary_is_ordinary_records"):
    def summarize(self, params: Params) -> Record:
        kept = list(self.records)
        answer = super().summarize(params)
        self.records = kept
        return answer


class KeepsItsModelToItself(Wrong, caught_by="summarize.describe_says_with_what_it_summarizes"):
    def describe(self, params: Params) -> Record:
        return {**super().describe(params), "summarize": {}}


class AlwaysWritesText(Wrong, caught_by="prompt.text_is_there_when_asked_for_and_only_then"):
    def with_prompt(self, result: Record, params: Params) -> Record:
        return super().with_prompt(result, {**params, "prompt": params.get("prompt") or True})


class CutsTextShort(Wrong, caught_by="prompt.a_budget_drops_whole_records"):
    def text(self, records: list[Record], budget: int | None) -> tuple[str, list[str]]:
        text, ids = super().text(records, None)
        return text[:budget], ids


class WritesTextItsOwnWay(Wrong, caught_by="prompt.what_is_not_offered_is_refused"):
    def check_text(self, options: Params) -> None:
        """Accept every option."""


class LeavesOutWhatDidNotFit(Wrong, caught_by="prompt.asking_for_text_does_not_change_what_is_found"):
    def with_prompt(self, result: Record, params: Params) -> Record:
        answer = super().with_prompt(result, params)
        kept = answer.get("prompt_ids")
        if kept is None:
            return answer
        return {**answer, "records": [record for record in answer["records"] if record["id"] in kept]}


class WritesTextUndeclared(Wrong, caught_by="prompt.an_undeclared_prompt_is_ignored"):
    capabilities = without("prompt")

    def with_prompt(self, result: Record, params: Params) -> Record:
        return {**result, "prompt": "text"} if params.get("prompt") else result


# --- stdio


class AnswersTwice(Wrong, caught_by="stdio.nothing_is_answered_that_is_no_request_and_nothing_twice", binding="stdio"):
    def lines_for(self, line: bytes) -> Iterable[bytes]:
        return 2 * list(super().lines_for(line))


class AnswersNotificationsLate(
    Wrong, caught_by="stdio.nothing_is_answered_that_is_no_request_and_nothing_twice", binding="stdio"
):
    """It answers a notification after the next call, since a client does not wait for that answer."""

    late: bytes | None = None

    def lines_for(self, line: bytes) -> Iterable[bytes]:
        message = json.loads(line)
        if "id" not in message:
            self.late = self.answer(json.dumps({**message, "id": None}).encode())
            return []
        lines, self.late = [*super().lines_for(line), *([self.late] if self.late is not None else [])], None
        return lines


class PrintsToStdout(Wrong, caught_by="stdio.stdout_carried_only_json_rpc", binding="stdio"):
    def remember(self, params: Params) -> Record:
        self.put(b"remembering")
        return super().remember(params)


class SpreadsItsMessages(Wrong, caught_by="stdio.stdout_carried_only_json_rpc", binding="stdio"):
    def put(self, message: bytes) -> None:
        super().put(message)
        super().put(b"")


class AsksItsClient(Wrong, caught_by="stdio.the_server_asks_nothing", binding="stdio"):
    def remember(self, params: Params) -> Record:
        self.put(self.rendered({"id": "mine", "method": "client/approve"}))
        return super().remember(params)


class StaysWhenStdinEnds(Wrong, caught_by="stdio.the_end_of_stdin_ends_it", binding="stdio"):
    def serve_stdio(self) -> int:
        super().serve_stdio()
        time.sleep(60)
        return 0


class EndsWithAnError(Wrong, caught_by="stdio.the_end_of_stdin_ends_it", binding="stdio"):
    def serve_stdio(self) -> int:
        super().serve_stdio()
        return 3


class DiesOfRubbish(Wrong, caught_by="stdio.blank_lines_and_rubbish_do_not_end_it", binding="stdio"):
    def lines_for(self, line: bytes) -> Iterable[bytes]:
        line.decode()
        return super().lines_for(line)


# --- servers that die


class DiesOfAnUnusedKey(Wrong, caught_by="keys.an_unused_key_is_null", binding="stdio"):
    """Dies at an unused key; each derived class dies in another way. No other check asks for such a key."""

    def nothing_at(self, key: str) -> Record | None:
        if key.endswith("/nothing"):
            self.die()
        return super().nothing_at(key)

    def die(self) -> None:
        dies("the first of many words\n1\n2\n3\nthere is no such page\n\x1b[31mthe pages are gone", 3)


class DiesInTheMiddleOfALine(DiesOfAnUnusedKey, caught_by="keys.an_unused_key_is_null", binding="stdio"):
    def die(self) -> None:
        sys.stdout.buffer.write(b'{"jsonrpc": "2.0", "id": 1, "resu')
        sys.stdout.buffer.flush()
        dies("", 4)


class IsKilled(DiesOfAnUnusedKey, caught_by="keys.an_unused_key_is_null", binding="stdio"):
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class HangsForGood(DiesOfAnUnusedKey, caught_by="keys.an_unused_key_is_null", binding="stdio"):
    def die(self) -> None:
        time.sleep(3600)


class ClosesItsStdout(DiesOfAnUnusedKey, caught_by="keys.an_unused_key_is_null", binding="stdio"):
    """It goes on running."""

    def die(self) -> None:
        os.close(1)
        time.sleep(3600)


class WritesWithoutEnd(DiesOfAnUnusedKey, caught_by="keys.an_unused_key_is_null", binding="stdio"):
    def die(self) -> None:
        while True:
            self.put(b"thinking")


class StartsOnce(DiesOfAnUnusedKey, caught_by="keys.an_unused_key_is_null", binding="stdio"):
    """It does not start if the file that the environment names exists: then it was started before."""

    def serve_stdio(self) -> int:
        if "STARTED" in os.environ:
            try:
                Path(os.environ["STARTED"]).touch(exist_ok=False)
            except FileExistsError:
                dies("cannot start: it is running already", 7)
        return super().serve_stdio()


class DiesOfForgetting(Wrong, caught_by="core.forget_removes_by_id", binding="stdio"):
    def forget(self, params: Params) -> Record:
        dies("nothing is forgotten here", 6)


def dies(words: str, code: int) -> NoReturn:
    """Write to stderr, and end this process at once."""
    print(words, file=sys.stderr, flush=True)
    os._exit(code)


# --- HTTP


class SignalsErrorsByStatus(Wrong, caught_by="http.errors_of_the_protocol_are_200", binding="http"):
    def status_of(self, answer: bytes) -> int:
        return 404 if json.loads(answer).get("error", {}).get("code") == -32002 else 200


class AnswersNotificationsOverHttp(Wrong, caught_by="http.a_notification_is_answered_202_with_nothing", binding="http"):
    def post(self, body: bytes, headers: Any) -> tuple[int, bytes]:
        status, answer = super().post(body, headers)
        return (200, b"{}") if status == 202 else (status, answer)


class AnswersGet(Wrong, caught_by="http.get_on_the_endpoint_is_405", binding="http"):
    def get(self, path: str, headers: Any) -> tuple[int, bytes]:
        return (200, b"{}") if path == "/" else super().get(path, headers)


class HidesItsProfile(Wrong, caught_by="http.the_profile_is_at_its_well_known_place", binding="http"):
    def get(self, path: str, headers: Any) -> tuple[int, bytes]:
        return 405, b""


class AdmitsEveryPage(Wrong, caught_by="http.an_unknown_origin_is_403", binding="http"):
    def is_foreign(self, headers: Any) -> bool:
        return False


class AdmitsSandboxedPages(Wrong, caught_by="http.an_unknown_origin_is_403", binding="http"):
    def is_foreign(self, headers: Any) -> bool:
        return headers.get("Origin") not in (None, "null")


class IgnoresTheVersionHeader(Wrong, caught_by="http.another_version_in_the_header_is_400", binding="http"):
    def refusal(self, headers: Any) -> tuple[int, bytes] | None:
        refusal = super().refusal(headers)
        return None if refusal and refusal[0] == 400 else refusal


class WantsTheVersionHeader(Wrong, caught_by="http.the_version_header_may_be_there_or_not", binding="http"):
    def refusal(self, headers: Any) -> tuple[int, bytes] | None:
        if "A2M-Protocol-Version" not in headers:
            return 400, self.error(None, -32007, "which version?")
        return super().refusal(headers)


class OffersPushOverHttp(Wrong, caught_by="http.push_is_not_offered_over_http", binding="http"):
    def pushes(self) -> bool:
        return True


class SubscribesOverHttp(Wrong, caught_by="http.subscribe_fails_over_http", binding="http"):
    def events_subscribe(self, params: Params) -> Record:
        return {"subscribed": True}


class DeclaresScopesToAnybody(
    Wrong, caught_by="http.scopes_are_declared_only_to_who_has_shown_who_they_are", binding="http"
):
    def caller(self, headers: Any) -> str | None:
        return super().caller(headers) or "nobody"


class AdmitsAnyToken(Wrong, caught_by="http.a_caller_without_a_credential_is_401", binding="http"):
    def caller(self, headers: Any) -> str | None:
        return super().caller(headers) or (headers.get("Authorization") and "guest")


def main(name: str) -> int:
    """Serve stdio as the server of this name; return the exit code."""
    return ({"Server": Server} | WRONG)[name]().serve_stdio()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
