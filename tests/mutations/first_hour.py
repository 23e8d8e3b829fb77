"""The deliberate faults that users met: what went wrong in the first hour with their own script, undone once more."""

from __future__ import annotations

from tests.mutations.mutation import Change, Mutation

LIFECYCLE = "tests/unit/p2pnode/lifecycle"


def _found_by_user(fault: str, test: str, file: str, old: str, new: str) -> Mutation:
    return Mutation("first hour", fault, test, (Change(file, old, new),))


FIRST_HOUR = (
    _found_by_user(
        "the script is killed 2 s after `swarm.done`",
        f"{LIFECYCLE}/test_shutdown.py::test_a_script_has_its_time_after_the_run_while_the_node_lingers",
        "p2pnode/lifecycle/shutdown.py",
        "        finish_s = self._config.training.finish_s\n",
        "        finish_s = 2.0\n",
    ),
    _found_by_user(
        "a script that is cut short ends with exit code 0",
        f"{LIFECYCLE}/test_shutdown.py::test_a_script_that_is_cut_short_gives_an_exit_code_of_its_own",
        "p2pnode/errors.py",
        "        return ExitCode.CUT_SHORT\n",
        "        return ExitCode.OK\n",
    ),
    _found_by_user(
        "a validation pass of 150 s that computes is killed",
        "tests/unit/training/supervisor/test_silence.py::test_silence_stalls_and_idleness_kills",
        "training/supervisor/silence.py",
        "WORKING_FACTOR = 360.0",
        "WORKING_FACTOR = 10.0",
    ),
    _found_by_user(
        "a script that fails is restarted for ever",
        "tests/unit/training/test_step_loop.py::test_a_trainer_is_restarted_a_number_of_times",
        "training/step_loop.py",
        "if self._failures.are_too_many(count):",
        "if count < 0:",
    ),
    _found_by_user(
        "a script that fails after each hour of training is restarted for ever",
        "tests/unit/training/test_failures.py",
        "training/failures.py",
        "max(self._since_step, sum(known == cause for _, known in self._kept))",
        "self._since_step",
    ),
    _found_by_user(
        "the same seed on every machine gives the same batches",
        "tests/unit/training/trainer_link/test_messages.py::"
        "test_start_seeds_differ_by_node_by_start_of_the_node_and_by_start_of_its_script",
        "training/trainer_link/messages.py",
        'text = b"%d/%d/%d/" % (seed, incarnation, starts) + node_id',
        'text = b"%d/%d/%d/" % (seed, incarnation, starts)',
    ),
    _found_by_user(
        "every machine trains the whole data set",
        "tests/unit/training/sharing/test_member.py::test_members_divide_an_epoch",
        "training/sharing/ranking.py",
        "    owners: npt.NDArray[np.intp] = np.argmax(table | keeps, axis=1)\n",
        "    owners: npt.NDArray[np.intp] = np.argmax(table | keeps, axis=1) * 0\n",
    ),
    _found_by_user(
        "nobody says that two machines train on the same data",
        "tests/unit/training/test_duplicate_data.py",
        "training/duplicate_data.py",
        '            self._log.warning("same_data", node=short(node), hint=ADVICE)\n',
        "            pass\n",
    ),
    _found_by_user(
        "`until` never fires by what a script evaluates",
        "tests/simulated/test_script_settings.py::"
        "test_until_ends_a_script_by_its_own_evaluations_and_all_nodes_write_its_model",
        "training/evaluations.py",
        "progress.goal_streak + 1 if self._goal.holds(evaluation.metrics) else 0",
        "0",
    ),
    _found_by_user(
        "a run that never ends does not say so",
        "tests/unit/training/test_step_loop.py",
        "training/loop_events.py",
        '        log.info("run_has_no_end", hint=NO_END)\n',
        "        pass\n",
    ),
    _found_by_user(
        "a run ends and does not say where the model is",
        f"{LIFECYCLE}/test_run_result.py",
        "p2pnode/lifecycle/run_result.py",
        "        if self.model:\n            found +=",
        "        if not self.model:\n            found +=",
    ),
    _found_by_user(
        "a start that fails leaves a directory that looks used",
        "tests/unit/p2pnode/test_fresh_directory.py::test_a_failed_start_leaves_nothing",
        "p2pnode/fresh_directory.py",
        "                _empty(folder)\n",
        "                pass\n",
    ),
    _found_by_user(
        "a start with another model changes the founder's directory",
        f"{LIFECYCLE}/test_startup.py::test_another_model_is_refused_and_costs_nothing",
        "p2pnode/lifecycle/state_directory.py",
        "        check_model(self.record, layout.digest(), _tensors(layout), frozen, self._path)\n",
        "        pass\n",
    ),
    _found_by_user(
        "an invitation holds `0.0.0.0`",
        "tests/unit/p2pnode/commands/test_key.py::test_an_invitation_names_what_others_can_dial",
        "p2pnode/keys/dialable.py",
        "if not is_literal(host) or usable_host(host) is not None:",
        "if host:",
    ),
    _found_by_user(
        "another `--run` goes on with the model in the state directory",
        "tests/unit/p2pnode/config/test_directory_record.py::test_another_run_is_refused_with_what_to_do",
        "p2pnode/config/directory_record.py",
        "if run_there and run_there != config.swarm.run:",
        "if not run_there and config.swarm.run == folder:",
    ),
    _found_by_user(
        "a changed model loads the vector and the optimiser of the old one",
        f"{LIFECYCLE}/test_startup.py::test_a_checkpoint_of_another_model_gives_nothing",
        "p2pnode/lifecycle/startup.py",
        "if found.state.layout_digest != layout.digest() or found.state.genesis != genesis:",
        "if found.state.genesis != genesis:",
    ),
    _found_by_user(
        "new checkpoints are deleted because older ones have higher steps",
        "tests/unit/training/test_checkpoint.py::test_the_newest_is_the_one_written_last",
        "training/checkpoint.py",
        "    return int(match[1] or 0), int(match[2])\n",
        "    return int(match[2]), int(match[1] or 0)\n",
    ),
    _found_by_user(
        "training stands still while a checkpoint is written",
        f"{LIFECYCLE}/test_checkpoints.py::test_the_next_step_waits_for_no_disk",
        "p2pnode/lifecycle/checkpoints.py",
        'asyncio.create_task(self._write(begun), name="checkpoint")\n',
        'asyncio.create_task(self._write(begun), name="checkpoint")\n                await self._writing\n',
    ),
    _found_by_user(
        "a node that leaves waits for an optimiser step of minutes",
        f"{LIFECYCLE}/test_checkpoints.py::test_a_trainer_that_saves_too_late_leaves_its_earlier_state",
        "p2pnode/lifecycle/checkpoints.py",
        "            async with asyncio.timeout(copy_s):\n",
        "            async with asyncio.timeout(None):\n",
    ),
    _found_by_user(
        "a script that joins in five lines trains for itself alone",
        "tests/simulated/test_models.py::test_two_nodes_train_as_one_process_on_both_batches[plain]",
        "training/exchange/exchange.py",
        "        report = await self.push_client.push(step, base_step, weight, delta, on_taken)\n",
        "        report = await self.push_client.push(step, base_step, weight, 0.0 * delta, on_taken)\n",
    ),
)
