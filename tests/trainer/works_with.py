"""What of Lightning works with the strategies, and which test shows it: docs/works_with.md's table.

`python docs/tables.py` writes the table; tests/trainer/test_works_with.py holds it to what it says.
"""

from __future__ import annotations

from typing import Final, NamedTuple

HERE: Final = "test_works_with.py::test_a_feature_works_and_ends_in_one_model"
FIT: Final = "test_strategy.py::test_"
MET: Final = "test_session.py::test_"
LOG: Final = "test_callbacks.py::test_"
CHECKPOINT: Final = "test_checkpoint.py::test_"
FAILURE: Final = "test_ending.py::test_"
TIME: Final = "test_clock.py::test_"
REFUSED: Final = "test_refusals.py::test_what_cannot_work_is_refused_on_every_rank_before_training"
WORKS: Final = "works"


class Row(NamedTuple):
    """One feature.

    Args:
        feature: its name
        verdict: "works", "works; ..." with what differs, or "refused; ..." with what to do
        shown_by: a test's id, with its parameter where that matters
    """

    feature: str
    verdict: str
    shown_by: str = HERE


TOGETHER: Final = "`allreduce` and the sparse strategies"
"""In which ranks step together."""

SECTIONS: Final[dict[str, list[Row]]] = {
    "A step": [
        Row("Gradient accumulation", WORKS, FIT + "accumulated_gradients_equal_one_process_on_the"
            "_concatenated_batches"),
        Row("`GradientAccumulationScheduler`", WORKS),
        Row("Clipping by norm or by value", "works; clips what the algorithm has made of the "
            "gradient", FIT + "clipping_clips_the_reduced_gradient"),
        Row("`configure_gradient_clipping`", WORKS),
        Row("Several optimizers", "works; a parameter in two of them is refused: give it to one",
            FIT + "two_optimizers_each_count_their_own_steps_and_all_weights_agree"),
        Row("Manual optimization", WORKS, FIT + "manual_optimization_equals_automatic"),
        Row("Adam, AdamW, momentum, Nesterov", WORKS, FIT + "wagma_averages_what_any_optimizer"
            "_makes"),
        Row("LBFGS", "refused; use SGD or Adam", REFUSED + "[LBFGS]"),
        Row("Learning rate schedulers, by step, epoch or metric", WORKS,
            FIT + "learning_rates_follow_their_schedule_on_every_rank"),
        Row("`detect_anomaly=True`", "works; also looks for NaN before weights are sent"),
        Row("Gradient checkpointing (`torch.utils.checkpoint`)", WORKS),
        Row("`torch.compile`", "works, with the backends `eager` and `inductor`; "
            "`self.log` in a compiled step cannot be traced by torch 2.13, under any strategy",
            FIT + "a_compiled_model_trains_like_the_plain_one"),
    ],
    "Precision": [
        Row("`bf16-mixed`", WORKS, FIT + "bf16_mixed_trains_weights_that_stay_float32"),
        Row("`16-mixed`", "works; a fused optimizer is refused: use `fused=False`; on CPUs "
            "Lightning makes `bf16-mixed` of it", FIT + "an_overflow_on_one_rank_makes_all_ranks"
            "_skip_the_step_together"),
        Row("`bf16-true`, `64-true`", WORKS),
        Row("Precision plugins of FSDP and DeepSpeed", 'refused; use `precision="16-mixed"` or '
            "`bf16-mixed`", REFUSED + "[FSDP's precision]"),
    ],
    "The model": [
        Row("Frozen, tied and unused parameters", "works, without `find_unused_parameters`",
            FIT + "tied_frozen_and_unused_parameters_are_treated_as_on_one_device"),
        Row("Parameters that no optimizer trains, and a step changes (BYOL's teacher)", "works; "
            "each rank has its own until they are averaged to be evaluated and saved",
            MET + "a_teacher_is_averaged_where_its_student_is"),
        Row("`BaseFinetuning`, `BackboneFinetuning`", "works; ranks begin anew with the consensus "
            "where the set of trained parameters changes", FIT + "parameters_that_the_optimizer"
            "_gets_later_are_trained_together_from_then_on"),
        Row("BatchNorm", "works; statistics are each rank's own, and averaged where the model is "
            "evaluated and saved", MET + "statistics_are_local_in_training_and_averaged_at_the"
            "_end"),
        Row("`sync_batchnorm=True`", "refused, but with `allreduce` and the sparse strategies on "
            "GPUs; leave it out", REFUSED + "[SyncBatchNorm]"),
        Row("Parameters of several dtypes", WORKS, MET + "models_of_several_parts_end_together"
            "_too"),
        Row("`configure_model`", WORKS),
        Row("Parametrizations (`weight_norm`)", WORKS),
        Row("`ModelPruning`", f"works with {TOGETHER}; else refused: prune after training",
            "test_works_with.py::test_ranks_that_step_together_prune_the_same_weights"),
        Row("Embeddings with `sparse=True`", "refused; use `sparse=False`",
            REFUSED + "[a sparse embedding]"),
        Row("Lazy modules", "refused; run a forward pass first", REFUSED + "[a lazy module]"),
    ],
    "Data": [
        Row("Different numbers of batches on the ranks", "works; all validate and save as often as "
            "the rank that does most often; `every_n_train_steps` and `train_time_interval` are "
            "refused: use `every_n_epochs`",
            MET + "ranks_with_different_numbers_of_batches_go_through_the_same_epochs"),
        Row("No batches on a rank (`allow_zero_length_dataloader_with_multiple_devices`)",
            "refused where other ranks have some, of a training, validation or test loader; give "
            "every rank at least one", MET + "what_makes_uneven_ranks_wait_for_each_other_is_"
            "refused[has nothing to train on]"),
        Row("`IterableDataset`", WORKS),
        Row("Several loaders (`CombinedLoader`)", WORKS),
        Row("`LightningDataModule`, `reload_dataloaders_every_n_epochs`", WORKS),
        Row("`limit_train_batches`, `limit_val_batches`, `overfit_batches`", WORKS),
        Row("`fast_dev_run`", WORKS),
    ],
    "Evaluation": [
        Row("Validation, also within an epoch", "works; sees the mean of the ranks' weights, or "
            'each rank\'s own with `evaluate="local"`', MET + "validation_shows_the_consensus_and"
            "_gives_back_the_weights_to_the_bit"),
        Row("`Trainer.validate`, `test`, `predict`", WORKS, MET + "validate_test_and_predict_work"
            "_alone_and_after_fit"),
        Row("A time as `val_check_interval`", "refused; use a number of batches",
            REFUSED + "[a time as val_check_interval]"),
        Row("`self.log(..., sync_dist=True)` of an epoch", WORKS, MET + "logged_values_are_over"
            "_all_ranks_where_that_makes_no_step_wait"),
        Row("`self.log(..., on_step=True, sync_dist=True)`", f"works with {TOGETHER}; else it "
            "logs the value of rank 0, with a warning", MET + "logged_values_are_over_all_ranks"
            "_where_that_makes_no_step_wait"),
        Row("torchmetrics objects", WORKS, MET + "a_torchmetrics_object_counts_over_ranks_with"
            "_different_numbers_of_batches"),
        Row("`all_gather` in a step", f"for {TOGETHER}; with others it is a barrier in every step "
            "([gallery](gallery.md#what-to-look-for))", "test_examples.py::test_negatives_come"
            "_from_all_ranks_where_these_step_together"),
        Row("`BasePredictionWriter`", WORKS),
    ],
    "Callbacks": [
        Row("`ModelCheckpoint`, monitored", "works; scores and holds the mean of the ranks, with "
            "replicas beside it", MET + "a_monitored_checkpoint_scores_and_holds_the_consensus"),
        Row("`ModelCheckpoint(save_top_k=...)`", "works; removes replicas with their file",
            CHECKPOINT + "save_top_k_removes_replicas_with_their_file"),
        Row("`ModelCheckpoint(save_last=...)`", WORKS, CHECKPOINT + "the_last_checkpoint_resumes"
            "_to_the_bit"),
        Row("`ModelCheckpoint(save_weights_only=True)`", "works; no replicas",
            CHECKPOINT + "save_weights_only_writes_the_consensus_alone"),
        Row("`ModelCheckpoint(train_time_interval=...)`", "works; all ranks save after the same "
            "batch; refused where they have different numbers of batches",
            TIME + "a_checkpoint_by_time_is_saved_after_the_same_batch_on_all_ranks"),
        Row("`ModelCheckpoint(save_on_exception=True)`", "works; where a rank has failed, rank "
            "0's weights alone are saved", FAILURE + "a_failed_training_is_saved_by_rank_0_if_that"
            "_is_alive"),
        Row("`OnExceptionCheckpoint`", "works; where a rank has failed, rank 0's weights alone "
            "are saved", "test_works_with.py::test_a_checkpoint_on_an_exception_is_saved"),
        Row("Checkpoints in the background (`AsyncCheckpointIO`)", WORKS,
            CHECKPOINT + "writing_in_the_background_saves_the_same"),
        Row("`EarlyStopping`", "works; all ranks stop after the same epoch",
            MET + "early_stopping_stops_all_ranks_after_the_same_epoch"),
        Row("`StochasticWeightAveraging`", WORKS, MET + "stochastic_weight_averaging_ends_with_one"
            "_model"),
        Row("`WeightAveraging`, `EMAWeightAveraging`", "works; each rank averages over time, and "
            "the file and the final model hold the mean of the ranks'", MET + "a_moving_average_of"
            "_the_weights_ends_with_one_model"),
        Row("`LearningRateMonitor`", WORKS),
        Row("`DeviceStatsMonitor`", WORKS),
        Row("`ThroughputMonitor`", WORKS),
        Row("`TQDMProgressBar`", WORKS),
        Row("`ModelSummary`", WORKS),
        Row("`LambdaCallback`", WORKS),
        Row("`SpikeDetection`", "works; every rank waits for all after every batch, and needs as "
            "many batches; where NaN is sent the sparse strategies end the training before it "
            "looks"),
        Row("`Timer`, `Trainer(max_time=...)`", "works; all ranks end after the same batch, "
            "or epoch, where they have different numbers of batches",
            TIME + "a_timer_ends_training_after_the_same_batch_on_all_ranks"),
        Row("`LearningRateFinder`", "refused; search with `Trainer(devices=1)`",
            REFUSED + "[LearningRateFinder]"),
        Row("`BatchSizeFinder`", "refused, as with every distributed strategy; search with "
            "`Trainer(devices=1)`", REFUSED + "[BatchSizeFinder]"),
    ],
    "The Trainer": [
        Row("Resume (`ckpt_path=...`)", "works; with as many ranks, to the bit where nothing "
            "depends on time", CHECKPOINT + "resumed_training_equals_uninterrupted_training_to_the"
            "_bit"),
        Row("Resume with another number of ranks, or from `ddp`", "works; all ranks start from "
            "the one model", CHECKPOINT + "another_number_of_ranks_starts_from_the_consensus_and"
            "_says_so"),
        Row("`fit` called twice", "works; with ranks that are forked or spawned, as in a notebook, "
            "with a new Trainer", FIT + "one_trainer_fits_twice"),
        Row("`max_steps`", "works; counts the steps of a rank; with different numbers of batches a "
            "rank that has made them has epochs without batches until all have",
            FIT + "max_steps_counts_the_steps_of_a_rank"),
        Row("Profilers (`simple`, `advanced`)", WORKS),
        Row("`CSVLogger`", WORKS, LOG + "figures_in_the_csv_log_are_those_of_the_formula"),
        Row("`WandbLogger`, offline", WORKS, LOG + "figures_are_in_an_offline_wandb_run_with_their"
            "_step_axis"),
        Row("`TensorBoardLogger`", WORKS),
        Row("`barebones=True`, `deterministic=True`", WORKS),
        Row("The launchers: a script by itself, torchrun, mpiexec, SLURM", WORKS,
            "test_launchers.py::test_torchrun"),
        Row('`start_method="spawn"` or `"fork"`', WORKS, "test_start_methods.py::test_weights_"
            "of_forked_ranks_come_back_and_are_trained_on"),
        Row("A notebook, Python's prompt", "works; ranks are forked ([notebooks](notebooks.md))",
            "test_notebook.py::test_the_example_runs_in_a_notebook"),
        Row("`LightningCLI`", WORKS, "test_cli.py::test_run_leaves_metrics_config_and_a"
            "_checkpoint"),
        Row("The package `pytorch_lightning`", WORKS, FIT + "pytorch_lightning_trains_like"
            "_lightning"),
    ],
}  # fmt: skip


def rows() -> list[Row]:
    """All of them."""
    return [row for section in SECTIONS.values() for row in section]


def markdown() -> str:
    """The table, with a line of its own before each section."""
    lines = ["| feature | verdict | shown by |", "|---|---|---|"]
    for section, listed in SECTIONS.items():
        lines.append(f"| **{section}** | | |")
        for row in listed:
            shown_by = row.shown_by.partition("::")[0] if row.shown_by == HERE else row.shown_by
            lines.append(f"| {row.feature} | {row.verdict} | `{shown_by}` |")
    return "\n".join(lines)
