"""Which tests `make check` and `make test` run: patterns of their names; `make test-all` runs every test.

SLOW: what costs much and rarely breaks, or breaks along with what a quicker test shows; not in `make test`.
CHECK: what starts no ranks and opens no socket; all that `make check` runs.
"""

import re

import pytest

TF = "(tensorflow|main_tf)"  # some seconds to start, whatever is tested
SLOW = [
    r"test_cluster_commands.*(02_horovod|bf16-03)",
    # whole programs that run many times
    "test_what_commands_print", "test_keras_fit",
    "test_every_chapter_trains_and_resumes", "test_weak_and_strong_scaling_with_two", "test_what_failed_is_recorded",
    "test_a_dry_run", "test_blanks_and_wildcards", "test_the_ordinary_script_learns",
    "test_it_runs_and_says", "test_the_runner_names",
    "test_an_instructor_runs", "test_cells_may_be_skipped",
    "test_the_search_trains_as_main_py_does", "test_a_run_on_two_ranks_sends",
    "test_notebook_parallelism.*run_that_fails",
    "test_every_rank_records_its_steps", r"test_a_killed_study.*\[rounding",
    "test_a_run_s_own_records", r"test_nothing_is_published.*\[[^sz]",
    # the same under one more launcher or scheduler
    r"test_launcher\[(mpiexec of Cray|mpiexec inside|torchrun (inside|on two))", "test_launcher_of_horovod.*PALS",
    r"test_deepspeed.*test_launchers\[torchrun", r"test_the_conversion_trains.*\[(python|torchrun)",
    r"test_under_a_launcher_of_ranks.*\[deepspeed", "test_ranks_started_by_hand",
    r"test_output_comes_from_rank_0.*\[02", "test_srun_with_and_without.*none",
    "test_a_job_that_loses_a_node", "test_lab.*(gloo_takes|torchrun_on|pytorch|04_deepspeed|side_by_side|parent_is)",
    "test_a_sweep_within_one_allocation", "test_the_allocation_says_how_many_ranks",
    "test_a_rank_that_dies_ends_a_job_of_horovodrun",
    # in one more chapter
    r"test_a_folder_travels\[(1-|2-(01|04|05|02_horovod/pytorch))", r"test_every_submit_script.*\[0[1245]",
    "test_two_runs_at_once_do_not_collide",
    r"test_global_batch_has_to_divide\[0[24]", "test_copies_elsewhere", "test_no_compiler_is_needed",
    "test_weights_of_zero", r"test_a_killed_sweep.*\[15", "test_mistakes.*test_(a_rank_that_dies|an_error).*horovod",
    # on one rank, on three and on four, beside two
    r"test_three_ways.*\[4", r"test_fp64_after_every_epoch\[.*-4", "test_fp32_differs.*deepspeed-[14]",
    r"test_a_stage_is_the_plain.*-[14]\]", r"test_fsdp_in_fp64_is_exact\[.-[14]", r"test_what_is_counted.*\[[24]",
    # faults that one program alone names
    "test_doctor.*(bound_to_one|other_nodes_cannot|contradict_each|wrong_sum|stays_alone|hangs)",
    "test_a_file_that_does_not_run.*endless", "test_make_docs_refuses",
    r"test_what_cannot_be_looked_at\[tensorflow", r"test_ranks_meet_though_mpi.*\[5",
    "test_the_last_row_can_read_it", "test_parallelism.*(differs_is_noticed|wrong_number)",
    "test_profile_step.*a_mistake", r"test_a_share_that_is_cut_off.*\[05_zero/fsdp",
    # bad input: one program of each kind stays, the quickest
    r"test_wrong_values_of_every_flag\[(01|02_horovod/tensorflow|0[345])", "test_wrong_(paths|configurations)",
    r"test_wrong_variables\[(01_single_node/main_tf|02)", "test_a_configuration_that_deepspeed", "test_one_of_two_rank",
    r"test_wrong_flags_of_other.*\[(tools\.|submit/doctor|03_ddp/three|02_)", "test_one_rank_of_other_programs",
    r"test_downloads.*test_(?!what_a_server_does.*\[01_single_node-)",
    "test_security.*test_(no_secret|jupyterlab|words_of)",
    r"test_deaths(?!.*\[03_ddp mpiexec 2 checkpoint SIGSTOP)",
    r"test_checkpoints(?!.*\[03_ddp|.*said_on)",
    "test_checkpoints.*(full_disk|folder_that_cannot|cut off|empty)", "test_elastic", "test_many",
    "test_places",
    # exercises that train, and what is like another mistake
    r"test_a_wrong_solution_has_its_hint\[[3489]-", r"test_what_is_not_begun_is_said\[[3489]",
    r"test_under_each_launcher\[(horovodrun|deepspeed|torchrun)", "test_a_script_of_one_s_own_is_watched_under_srun",
    r"test_each_training.*(one rank\]|under Adam|nobody broadcasts|fp64|Adam\]|by_fsdp-no|a hook|by hand\])",
    # TensorFlow beside PyTorch
    f"test_launchers.*test_(a_folder_travels|launcher_of|local_rank|more_ranks_than).*{TF}",
    "test_batchnorm_of_all_ranks", r"test_a_resnet_is_evaluated.*\[0[24]", f"test_learning_rate.*{TF}",
    f"test_equality.*test_(fp32|gloo|a_resnet|a_checkpoint|the_check_notices|resume).*{TF}",
    r"test_gloo_and_mpi_give_the_same\[02",
    f"test_contract.*(several_ranks|flags_reach).*{TF}", "test_tensorflow_s_base_is_plain_keras",
    f"test_(images_stay|svhn).*{TF}",
]
CHECK = [
    "test_at_scale", "test_cost_model", "test_figures", "test_repository", "test_records",
    "test_runs.*(other_code|check_fails|cut_off)",
    "test_notebooks.*(six_are|stored_with|another_cell|names_all|numbers_in|audience|too_small|plan_b)",
    "test_slurm.*(header|missing|tear|both|near|polaris|launch_command|shellcheck|submission)",
    "test_doctor.*(interfaces_are|table|no_number)",
    "test_sweep.*(no_record|remarkable|figure|refused)",
]
NOT_CHECK = ["test_records.*(dirty_tree_or|own_records|all_reduces)", "test_make_docs", "test_the_buckets_are"]
collected = []  # the names of all tests that pytest has found in this run


def any_of(patterns, name):
    return any(re.search(pattern, name) for pattern in patterns)


def mark(items):
    """Mark the tests as the tables say."""
    collected.extend(item.nodeid for item in items)
    for item in items:
        if any_of(SLOW, item.nodeid):
            item.add_marker(pytest.mark.slow)
        elif any_of(CHECK, item.nodeid) and not any_of(NOT_CHECK, item.nodeid):
            item.add_marker(pytest.mark.check)
