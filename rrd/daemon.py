"""The daemon: one event loop that owns all state. Signals, files, sockets and workers only wake it.

It trains nothing and imports no torch. It is ready as soon as the loop runs; models load afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rrd import __version__, durable, history
from rrd.config import Config, is_service
from rrd.control import Control
from rrd.errors import BadJob, Denied, RrdError
from rrd.gate import make_gate
from rrd.handle import Nursery
from rrd.herald import Herald
from rrd.intake import Intake
from rrd.job import JOB_FILE, JobSpec, parse_job
from rrd.journal import Journal, Kind
from rrd.keeper import Keeper
from rrd.lane import Lane
from rrd.ledger import Ledger, Record
from rrd.metrics import Meters
from rrd.notify import Notify, handed
from rrd.scheduler import Scheduler
from rrd.snapshot import Snapshot
from rrd.spool import JobFile, Scan, Spool
from rrd.states import JobState
from rrd.text import count
from rrd.verbs import Verbs
from rrd.watch import Watch
from rrd.web import Web

TELL_SECONDS = 10.0
"""How long the end of the daemon waits for the end of jobs to be told."""
STATUS_SECONDS = 2.0
"""How often the status file for ``rrd status`` without a daemon is renewed."""


class Daemon:
    """One daemon over one state directory. ``run`` until stopped, or with ``until_done`` until every job has ended."""

    def __init__(self, config: Config, *, journal: Journal, notify: Notify, until_done: bool = False,
                 live: Callable[[str], None] | None = None) -> None:
        self.config, self.journal, self.notify, self.until_done = config, journal, notify, until_done
        self.started_at = time.time()
        self.config_error = ""
        self.scan: Scan | None = None
        self.meters, self.nursery = Meters(), Nursery()
        self.keeper = Keeper(Ledger(config.state_dir / "jobs"), self._ledger_trouble)
        self.scheduler = Scheduler(config, keeper=self.keeper, nursery=self.nursery, journal=journal,
                                   meters=self.meters, live=live)
        self.intake = Intake(self.scheduler)
        self.herald = Herald(lambda: self.config, lambda: self.scheduler.jobs.values(), self.keeper, journal)
        self.watch = Watch(config.jobs_dir, rescan_seconds=config.rescan_seconds)
        self.spool: Spool | None = None
        self.control: Control | None = None
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._beat = 0.0
        self._disk: tuple[int, int] | None = None

    # --- start, run, stop ---

    async def run(self) -> int:
        """Returns the exit code: 0, or 1 if ``until_done`` and a job did not succeed."""
        make_dirs(self.config)
        with durable.lock(self.config.state_dir / "lock", what=f"the state directory {self.config.state_dir}"):
            self._catch_signals()
            await self._recall()
            control = self.control = Control(self.config.control_socket, self.config.group, self._verbs(), self._audit)
            await control.start()
            web = self._start_web()
            self._start_lanes()
            self._tasks += [asyncio.create_task(work) for work in (
                self._follow_spool(), self._feed_watchdog(), self._keep_status(), self.herald.run())]
            self.notify.ready("looking for jobs")
            self.journal.event(Kind.READY, "info", f"ready: {self._dies()}, jobs from {self.config.jobs_dir}")
            try:
                await self._work()
            finally:  # a bug of ours must not cost the jobs their steps
                await self._shut_down()
                if web is not None:
                    await asyncio.to_thread(web.stop)
                await control.stop()
        return self._exit_code()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self.reload)

    async def _recall(self) -> None:
        """What the ledger knows, before the spool is read: jobs go on even if the spool cannot be."""
        ledger = self.keeper.ledger
        records, faults = await asyncio.to_thread(ledger.load)
        for fault in faults:
            self.journal.event(Kind.LEDGER, "error", fault, hint="the job goes on from its checkpoints")
        specs, accepted = await asyncio.to_thread(_accepted, self.config, ledger, records)
        pasts = await asyncio.to_thread(
            lambda: {job: history.newest(ledger.dir(job), record.announced_step) for job, record in records.items()})
        self.intake.restore(records, specs, pasts)
        if self.until_done:
            self.scheduler.try_again()
        self.spool = Spool(self.config, accepted=accepted)
        self.scheduler.changed = self._wake.set

    def _start_web(self) -> Web | None:
        at = handed("metrics") or self.config.metrics_address
        if at is None:
            return None
        web = Web(self.snapshot, self.meters)
        try:
            web.start(at)
        except RrdError as e:
            self.journal.event(Kind.WEB, "warning", e.message, hint=e.hint)
            return None
        return web

    def _start_lanes(self) -> None:
        for spec in self.config.lanes:
            lane = Lane(spec, self.config, gate=make_gate(spec.gate), nursery=self.nursery, host=self.scheduler)
            self.scheduler.lanes[lane.name] = lane
            self._tasks.append(asyncio.create_task(lane.run(), name=f"lane {lane.name}"))

    async def _work(self) -> None:
        """Advance whenever something changed, until there is a reason to stop."""
        while not self._stop.is_set():
            self._wake.clear()
            self.scheduler.advance()
            if self.until_done and self._all_done():
                return
            self._raise_faults()
            at = self.scheduler.wake_at()
            timeout = 1.0 if at is None else min(1.0, max(0.0, at - time.monotonic()))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), timeout)

    def _raise_faults(self) -> None:
        """A task of ours that ended by itself is a bug: end with its stack rather than limp on."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (e := task.exception()):
                raise e
        if self.keeper.bug:
            raise self.keeper.bug

    def stop(self) -> None:
        """Finish the steps in progress, checkpoint every resident job, end. Asked twice: without those steps."""
        if not self._stop.is_set():
            self.journal.event(Kind.STOPPING, "info", "stopping: finishing the steps in progress, saving every job")
        else:
            self.journal.event(Kind.STOPPING, "info", "asked again: the steps in progress are given up")
            for lane in self.scheduler.lanes.values():
                lane.stop_soon(hurry=True)
        self._stop.set()
        self._wake.set()

    async def _shut_down(self) -> None:
        self.notify.stopping("saving every job")
        self._tasks.append(asyncio.create_task(self._ask_for_time()))
        await self.scheduler.preparer.stop()
        lanes = list(self.scheduler.lanes.values())
        for lane in lanes:
            lane.stop_soon()
        await asyncio.gather(*(t for t in self._tasks if t.get_name().startswith("lane")), return_exceptions=True)
        await asyncio.gather(*(lane.stop() for lane in lanes))
        await self.nursery.stop()
        for job in self.scheduler.jobs.values():
            self.keeper.save(job)
        with contextlib.suppress(asyncio.TimeoutError):  # what is not told now will be at the next start
            await asyncio.wait_for(self.herald.tell_all(), TELL_SECONDS)
        await self.keeper.flush()
        await asyncio.to_thread(self._write_status, self.snapshot())
        self.keeper.close()
        await self.watch.close()
        for task in self._tasks:
            task.cancel()
        self.journal.event(Kind.STOPPED, "info", "stopped")

    # --- the spool ---

    async def _follow_spool(self) -> None:
        assert self.spool is not None
        check: float | None = None
        while await self.watch.dirty(check) and not self._stop.is_set():
            scan = await asyncio.to_thread(self.spool.scan)
            check = scan.next_check
            if scan.unavailable and not (self.scan and self.scan.unavailable):
                self.journal.event(Kind.SPOOL, "error", scan.unavailable.sentence, hint=scan.unavailable.hint)
            self.scan = scan
            self.intake.apply(scan)

    def reload(self) -> None:
        """SIGHUP: read the configuration and the spool again. What needs new lanes needs a new start."""
        self.notify.reloading()
        try:
            fresh = Config.load(self.config_file, self.config_overrides)
        except RrdError as e:
            self.config_error = e.message
            self.journal.event(Kind.CONFIG, "error", f"the configuration stays as it was: {e.message}", hint=e.hint)
        else:
            self.config_error = ""
            self._adopt(fresh)
        self.watch.poke()
        self.notify.ready()

    config_file: Path | None = None
    config_overrides: dict[str, Any] = {}  # noqa: RUF012 (set per instance by ``run_daemon``)

    def _adopt(self, fresh: Config) -> None:
        live = {"model_roots", "data_roots", "spool_uids", "jobs_per_die", "hang_seconds", "output_root",
                "on_done", "on_failed"}
        old, new = self.config.model_dump(), fresh.model_dump()
        later = sorted(k for k in old if old[k] != new[k] and k not in live)
        self.config = self.config.model_copy(update={k: getattr(fresh, k) for k in live})
        self.scheduler.config = self.config
        for lane in self.scheduler.lanes.values():
            lane.config = self.config
        if self.spool is not None:
            self.spool.reconfigure(self.config)
        text = "the configuration was read again"
        if later:
            text += f"; {', '.join(later)} will change at the next start"
        self.journal.event(Kind.CONFIG, "warning" if later else "info", text)

    # --- housekeeping ---

    async def _feed_watchdog(self) -> None:
        """On the loop and nowhere else: a loop that is stuck is what the watchdog is for."""
        while self.notify.watchdog_interval is not None:
            self.notify.watchdog()
            await asyncio.sleep(self.notify.watchdog_interval)

    async def _ask_for_time(self) -> None:
        """While large checkpoints are being written at the end, systemd should not lose patience."""
        while True:
            self.notify.extend(60)
            await asyncio.sleep(20)

    async def _keep_status(self) -> None:
        while True:
            self.notify.status(self._summary())
            self._disk = await asyncio.to_thread(durable.space, self.config.state_dir)
            start = time.monotonic()
            snapshot = self.snapshot()
            await self._keep_reachable()
            cost = time.monotonic() - start  # grows with the jobs known; the loop should not feel it
            await asyncio.to_thread(self._write_status, snapshot)
            await asyncio.sleep(max(STATUS_SECONDS, 100 * cost))

    async def _keep_reachable(self) -> None:
        """Somebody may tidy up the runtime directory under us; without its socket nobody could say a word to us."""
        if self.control is None or self.config.control_socket.exists() or self._stop.is_set():
            return
        with contextlib.suppress(OSError, RrdError):
            durable.make_dir(self.config.run_dir)
            await self.control.stop()
            await self.control.start()
            self.journal.event(Kind.CONTROL, "warning", f"the control socket was gone and is back: {self.control.path}")

    def _write_status(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(OSError, RrdError):  # only a convenience for when we are down
            path = self.config.run_dir / "status"
            path.mkdir(exist_ok=True)
            durable.replace_volatile(path / "snapshot.json", snapshot.model_dump_json().encode())

    def _ledger_trouble(self, job: str, e: RrdError) -> None:
        self.journal.event(Kind.LEDGER, "error", e.message, hint=e.hint, job=job)

    # --- how it stands ---

    def snapshot(self) -> Snapshot:
        s, scan = self.scheduler, self.scan
        return Snapshot(
            version=__version__, pid=os.getpid(), time=time.time(), started_at=self.started_at,
            state_dir=str(self.config.state_dir), jobs_dir=str(self.config.jobs_dir), stopping=self._stop.is_set(),
            config_error=self.config_error, spool_error=scan.unavailable.sentence if scan and scan.unavailable else "",
            spool_watch_healthy=self.watch.healthy,
            disk_free_bytes=self._disk and self._disk[0], disk_size_bytes=self._disk and self._disk[1],
            jobs=s.views(),
            dies=[d for lane in s.lanes.values() for d in lane.die_views()],
            lanes=[lane.view() for lane in s.lanes.values()], rejected=self.intake.rejected_views())

    def _summary(self) -> str:
        states = [j.state for j in self.scheduler.jobs.values()]
        parts = [f"{states.count(state)} {state}" for state in JobState if state in states]
        return f"{count(len(states), 'job')}: {', '.join(parts)}" if states else "no jobs"

    def _dies(self) -> str:
        lanes = self.config.lanes
        return f"{count(sum(len(lane.dies) for lane in lanes), 'die')} in {count(len(lanes), 'lane')}"

    def _all_done(self) -> bool:
        return self.scan is not None and not self.scan.pending and self.scan.next_check is None \
            and self.scheduler.all_ended

    def _exit_code(self) -> int:
        if not self.until_done:
            return 0
        good = all(j.state in (JobState.DONE, JobState.REMOVED) for j in self.scheduler.jobs.values())
        return 0 if good and not self.intake.rejected else 1

    # --- the control socket ---

    def _verbs(self) -> dict[str, Callable[..., Any]]:
        def status() -> bytes:
            return b'{"ok": true, "result": ' + self.snapshot().model_dump_json().encode() + b"}"

        def reload() -> str:
            self.reload()
            if self.config_error:
                raise RrdError(f"the configuration stays as it was: {self.config_error}")
            return "read again"

        def stop() -> str:
            self.stop()
            return "stopping"

        user = Verbs(self.scheduler)
        asked = (user.pause, user.resume, user.cancel, user.restart, user.unfence)
        verbs = [status, reload, stop, *map(self._on_job, asked)]
        return {v.__name__: v for v in verbs}

    def _on_job(self, verb: Callable[..., str]) -> Callable[..., str]:
        def on_job(**args: Any) -> str:
            name = args.pop("die", None) or args.pop("job")
            answer = verb(str(name), **args)
            self._wake.set()
            return answer

        on_job.__name__ = verb.__name__
        return on_job

    def _audit(self, verb: str, uid: int) -> None:
        if verb != "status":
            self.journal.event(Kind.CONTROL, "info", f"user {uid} asked for {verb}")


def make_dirs(config: Config) -> None:
    """The directories the daemon owns. Raises RrdError with the path that cannot be made."""
    for path in (config.state_dir, config.state_dir / "jobs", config.cache_dir, config.run_dir):
        try:
            durable.make_dir(path)
        except OSError as e:
            said = f"cannot make or use {path}: {(e.strerror or str(e)).lower()}"
            raise Denied(said, hint="name another directory, or let this user write there") from e
    if not is_service(os.environ):
        with contextlib.suppress(OSError):  # the scan says what is wrong with it
            durable.make_dir(config.jobs_dir)


def _accepted(config: Config, ledger: Ledger, records: dict[str, Record]) -> tuple[dict[str, JobSpec], list[JobFile]]:
    """The jobs as they were accepted, from the copies of their files in the state directory."""
    specs: dict[str, JobSpec] = {}
    files: list[JobFile] = []
    for job_id, record in records.items():
        data = ledger.job_toml(job_id)
        if data is None:
            continue
        with contextlib.suppress(BadJob):
            specs[job_id] = parse_job(JOB_FILE, data)
            if record.state is not JobState.REMOVED:
                file = config.jobs_dir / f"{job_id}.toml"
                files.append(JobFile(job_id, file, specs[job_id], "", record.submitted_at, data))
    return specs, files


def run_daemon(config: Config, *, until_done: bool, live: Callable[[str], None] | None = None,
               config_file: Path | None = None, overrides: dict[str, Any] | None = None) -> int:
    """Run a daemon in this process until it stops; returns its exit code. Raises RrdError when it cannot start."""

    async def main() -> int:
        with Journal.for_process(config.state_dir / "jobs") as journal:
            daemon = Daemon(config, journal=journal, notify=Notify(), until_done=until_done, live=live)
            daemon.config_file, daemon.config_overrides = config_file, overrides or {}
            return await daemon.run()

    return asyncio.run(main())


