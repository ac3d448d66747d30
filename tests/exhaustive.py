"""Tests that `make test` leaves out beside those marked in their files, and what proves them there.

`make test-all` runs them.
"""

# By file (or folder): the beginning of a test's name, and the test of the same promise that
# `make test` runs. An empty name is the whole file.
LEFT_OUT: dict[str, dict[str, str]] = {
    # Snakemake over the whole workflow: each run takes minutes.
    "tests/workflow/test_restart.py": {
        "": "tests/faults/test_training_resume.py",
    },
    "tests/workflow/test_next.py": {
        "": "tests/unit/report/test_status.py",
    },
    "tests/workflow/test_overlays.py": {
        "test_a_config_that_lint_refuses_is_refused_at_the_same_place[o": "[run",
        "test_a_config_that_lint_refuses_is_refused_at_the_same_place[s": "[run",
        "test_a_config_that_lint_passes_is_planned_with_its_stages_alone[grpo]": "[both]",
        "test_a_config_that_lint_passes_is_planned_with_its_stages_alone[changed": "[both]",
        "test_a_config_that_lint_passes_is_planned_with_its_stages_alone[sft]": "[both]",
    },
    "tests/workflow/test_examples.py": {
        "test_an_example_of_a_foreign_trainer_is_planned_without_server_and_agents"
        "[verl]": "[areal]",
        "test_an_example_of_a_foreign_trainer_is_planned_without_server_and_agents[nemo": "[areal]",
        "test_a_cluster_example_is_planned[qwen3-2x8-h100-megatron]": "[qwen3-2x8-h100]",
    },
    # A private cluster, on which most of the time is Slurm's own.
    "tests/slurm/test_node_fault_on_slurm.py": {
        "": "tests/unit/preflight, tests/faults/test_stage_faults.py",
    },
    "tests/slurm/test_requeue_on_slurm.py": {
        "test_a_training_stage_over_two_nodes": "tests/faults/test_training_resume.py",
    },
    "tests/slurm/test_command_on_slurm.py": {
        "test_a_hung_rank_is_named_and_the_stage_resumes_alone"
        "[torchrun]": "tests/faults/test_command_stages.py",
    },
    "tests/slurm/test_debug_on_slurm.py": {
        "": "tests/unit/debug",
    },
    "tests/slurm/test_serving_on_slurm.py": {
        "test_cancelled_server": "test_server_is_a_job_of_its_own",
        "test_time_in_the_queue": "test_server_is_a_job_of_its_own",
    },
    "tests/slurm/test_watch_on_slurm.py": {
        "test_a_stall_is_cancelled": "test_a_stopped_rank_is_named",
    },
    "executor/tests/faults/test_retries.py": {
        "test_a_job_runs_as_often_and_with_what_it_would_locally[of the rule,": "[of the rule]",
        "test_a_job_runs_as_often_and_with_what_it_would_locally[of the command": "[of the rule]",
        "test_a_group_is_tried_again": "executor/tests/unit/test_work.py",
    },
    "executor/tests/faults/test_sites.py": {
        "test_what_stays_after_success": "executor/tests/unit/test_logs.py",
        "test_a_users_other_names": "executor/tests/unit/test_values.py",
        "test_a_path_may_hold_what_slurm_and_shells_replace[a b": "[50%j",
        "test_a_refusal_that_passes": "executor/tests/unit/test_patience.py",
        "test_a_rewritten_comment": "executor/tests/unit/test_identity.py",
        "test_job_ids_are_never_taken_from_a_sites_chatter[instead": "[around the id]",
        "test_job_ids_are_never_taken_from_a_sites_chatter[a number": "[around the id]",
        "test_a_backslash": "executor/tests/unit/test_settings.py",
        "test_held_jobs_are_shown_with_what_to_do_and_do_not_stay_in_the_queue"
        "[SpecialExit]": "[Requeuehold]",
    },
    "executor/tests/faults/test_snakemake.py": {
        "test_one_failure_among_forty": "executor/tests/faults/test_endings.py",
        "test_a_running_jobs_half_written": "test_an_output_that_was_made_unwatched",
    },
    "executor/tests/faults/test_daemons.py": {
        "test_the_controller_is_dead": "test_jobs_of_a_dead_slurmd",
        "test_a_controller_that_hangs": "executor/tests/unit/test_patience.py",
    },
    "executor/tests/faults/test_clusters.py": {
        "test_a_whole_run_works_without_an_accounting_database[filetxt]": "[none]",
        "test_a_strangers_job": "test_own_jobs_of_a_cluster_made_anew",
    },
    "executor/tests/faults/test_stops.py": {
        "test_a_slurm_that_stays_silent": "executor/tests/unit/test_patience.py",
        "test_ctrl_c_after_sigterm": "test_the_end_of_the_login_node",
    },
    "executor/tests/faults/test_changes.py": {
        "test_after_a_kill_nothing_runs_twice": "test_after_a_kill_the_outputs_are_those",
        "test_behind_a_precommand": "test_after_a_kill_the_outputs_are_those",
    },
    "executor/tests/faults/test_nodes.py": {
        "test_a_preempted_job": "test_a_job_of_a_node_set_down",
    },
    "executor/tests/slurm/test_environment_on_slurm.py": {
        "test_all_variables_at_once": "test_no_variable_alone",
    },
    # Stages that are killed, stopped or filled.
    "tests/faults/test_training_resume.py": {
        "test_killed_and_full_disks_during_the_write": "test_a_killed_run_goes_on",
        "test_grpo_whose_weights_do_not_fit": "test_a_checkpoint_that_does_not_fit",
    },
    "tests/faults/test_every_fault.py": {
        "test_fault_is_told_by_its_cause_and_its_culprit"
        "[file system stalls]": "its recording, replayed",
        "test_fault_is_told_by_its_cause_and_its_culprit"
        "[dead orchestrator]": "its recording, replayed",
    },
    "tests/faults/test_preflight_faults.py": {
        "test_every_injected_fault_is_found_and_blamed_on_this_node[gloo_dead": "[gpu_missing",
        "test_every_injected_fault_is_found_and_blamed_on_this_node[probe_hang": "[gpu_missing",
        "test_a_full_disk_is_found": "test_a_disk_without_a_byte_left",
        "test_a_file_size_limit": "test_a_disk_without_a_byte_left",
    },
    "tests/faults/test_stage_faults.py": {
        "test_a_rank_that_hangs_does_not_hang_the_stop": "tests/unit/training/test_stopping.py",
    },
    "tests/faults/test_rollout_faults.py": {
        "test_a_component_killed_in_the_middle_of_answers_ends_the_stage_and_is_named"
        "[trainer": "[inference]",
        "test_a_component_killed_in_the_middle_of_answers_ends_the_stage_and_is_named"
        "[orch": "[inference]",
    },
    "tests/faults/test_hang_jobs.py": {
        "test_rank_that_calls_an_extra_collective": "tests/unit/diagnosis",
    },
    "tests/faults/test_drift.py": {
        "test_an_engine_that_takes_its_updates": "test_an_engine_that_drops_its_updates",
    },
    "tests/faults/test_stage_lease.py": {
        "test_what_outlives_a_killed_supervisor_is_gone_before_the_next_one_trains"
        "[False]": "[True]",
    },
    "tests/unit/training/test_stage_provenance.py": {
        "test_a_stage_that_went_on_with_another": "test_a_finished_stage_is_not_the_result",
        "test_other_contents_under_the_same_names_start_the_stage_anew_and_say_so"
        "[_middle": "[_reward",
        "test_other_contents_under_the_same_names_start_the_stage_anew_and_say_so"
        "[_template": "[_reward",
    },
    # Agents and comparisons as processes of their own.
    "tests/unit/agents/test_early_end.py": {
        "test_too_few_descriptors_are_the_one_cause_with_the_limit_and_the_remedy"
        "[direct]": "[proxy]",
        "test_a_signal_in_a_check_keeps_it_and_those_before[controller-8-2]": "[controller-8-15]",
        "test_a_signal_in_a_check_keeps_it_and_those_before[concurrent-1-2]": "[concurrent-1-15]",
        "test_a_signal_in_a_check_keeps_it_and_those_before[single-0-2]": "[single-0-15]",
    },
    "tests/unit/agents/test_one_row_again.py": {
        "test_the_next_command_of_checks": "test_the_next_command_of_a_run",
    },
    "tests/unit/agents/test_areal_workflow.py": {
        "test_what_its_engine_generates_is_recorded_and_its_tensors_reward_it"
        "[areal.workflow.rlvr:RLVRWorkflow-more1": "more0",
        "test_what_its_engine_generates_is_recorded_and_its_tensors_reward_it"
        "[areal.workflow.multi_turn:MultiTurnWorkflow-more3": "more2",
    },
    "tests/unit/commands/compare/test_named_factors.py": {
        "test_the_trainer_s_own_forward_is_a_factor[megatron]": "[fsdp]",
        "test_deep_factors": "tests/unit/consistency",
    },
    "tests/unit/consistency/test_factors_vllm.py": {
        "test_float32_on_both_sides": "tests/unit/commands/compare/test_named_factors.py",
    },
    "tests/unit/inference/test_vllm.py": {
        "test_server_killed_with_its_daemon": "tests/faults/test_serving_faults.py",
    },
    # Inputs made at random, and scripts that no user runs.
    "tests/security/test_budgets.py": {
        "test_hostile_inputs_get_an_answer_within_a_minute_and_a_gigabyte[texts": "[pickles",
        "test_hostile_inputs_get_an_answer_within_a_minute_and_a_gigabyte[bombs": "[pickles",
    },
    "tests/security/test_supply_chain.py": {
        "test_file_that_an_index_replaced_is_refused[fallback]": "[index]",
    },
    "tests/unit/benchmarks": {
        "": "make bench",
    },
}

# The beginnings of node ids.
PREFIXES = tuple(
    f"{file}::{name}" if name else file for file, rows in LEFT_OUT.items() for name in rows
)


def is_left_out(node_id: str) -> bool:
    return node_id.startswith(PREFIXES)
