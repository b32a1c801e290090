"""The events tell the story of each job, in sentences."""

from __future__ import annotations

from pathlib import Path

from world import DIE, World, play


def test_a_job_s_story_can_be_read_from_its_events(tmp_path: Path) -> None:
    async def tell() -> None:
        async with World(tmp_path, 1, jobs_per_die=1) as w:
            w.drop("first", max_steps=20)
            await w.until_state("first", "running")
            w.drop("second", max_steps=30, die=0)
            w.workers.at("second", "step 15", DIE)
            await w.until_done("first", "second")
            story = [s.message for s in w.journal.all if s.job == "second"]
            chapters = ["accepted, lora on /m", "waiting: ", "loaded in ", "checkpoint of step 10 is safe",
                        "resuming from the newest checkpoint", "resumed from step 10", "checkpoint of step 20 is safe",
                        "wrote /out/second", "done after 30 steps: /out/second"]
            at = 0
            for chapter in chapters:
                found = [i for i in range(at, len(story)) if chapter in story[i]]
                assert found, (chapter, story)
                at = found[0] + 1
            assert sum(s.startswith("waiting: ") for s in story) == 1, "once, however long it lasts"
            assert not [s for s in w.journal.all if s.job == "first" and s.message.startswith("waiting")]

    play(tell())
