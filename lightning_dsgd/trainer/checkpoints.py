"""Lightning's hooks for checkpoints: ranks save together, and each goes on from its own replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dsgd.session.checkpoint import files, record
from lightning_dsgd.session.checkpoint.saving import save
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.trainer import seams
from lightning_dsgd.trainer.launched import LaunchedMixin
from lightning_dsgd.trainer.sessions import TrainerSession


class CheckpointsMixin(LaunchedMixin):
    """Saves and loads checkpoints of a strategy; the head of the file tells how."""

    session: TrainerSession
    _resumes_own: bool
    """Whether this rank goes on from its replica, and not from the consensus."""
    _handed_over: dict[str, Any] | None
    """What the others gave this newcomer."""
    _random_states: dict[str, Any] | None
    """The random states with which the next batch begins."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        session = self.session
        session.check_process()
        is_broken = session.phase is Phase.BROKEN
        if session.training is None or is_broken:
            if is_broken and self.is_global_zero:
                rank_zero_warn(
                    f"saving the weights of rank 0 alone to {filepath}: the other ranks are gone"
                )
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        save(
            session,
            self.checkpoint_io,
            str(filepath),
            checkpoint,
            storage_options,
            has_replicas="optimizer_states" in checkpoint,
        )

    def noted(self, checkpoint: dict[str, Any], trainer: Any) -> dict[str, Any]:
        """Returns a checkpoint with what this strategy needs, besides the replicas, to go on."""
        return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        self.session.check_process()
        if self.is_global_zero:
            files.remove(self.checkpoint_io, filepath)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if not self.session.is_open:  # in the process that forks the ranks
            return dict(super().load_checkpoint(checkpoint_path, weights_only))
        if self._handed_over is not None and self._trainer_state() == "fit":
            return self._handed_over
        path = self.session.text_of_rank_0(str(checkpoint_path))  # as it was when it was saved
        shared: dict[str, Any] = super().load_checkpoint(path, weights_only)
        if self._trainer_state() != "fit":
            return shared
        own = files.load_replica(
            self.checkpoint_io,
            self.session.meetings,
            path,
            shared,
            self.algorithm,
            announce=rank_zero_info,
            weights_only=weights_only,
        )
        self._resumes_own = own is not None
        return shared if own is None else own

    def _trainer_state(self) -> str | None:
        return None if self.lightning_module is None else self.lightning_module.trainer.state.fn

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        training = self.session.training
        if training is None:
            return
        if training.claiming is not None:
            training.claiming.restore(checkpoint)
        elif record.CLAIMS in checkpoint and seams.is_within_epoch(checkpoint):
            raise ValueError(
                "an epoch must go on with the data= that it began with, got a checkpoint within an "
                'epoch of data="claimed" with data="equal"; resume with data="claimed", or from a '
                "checkpoint of an epoch's end"
            )
        if self._resumes_own:
            self._restore(checkpoint)
        else:
            record.carry_over(checkpoint, training.replica)

    def _restore(self, own: Mapping[str, Any]) -> None:
        """Goes on from this rank's replica."""
        training = self.session.training
        assert training is not None
        states = record.restore(own, training.replica)
        if seams.is_within_epoch(own):
            self._random_states = states
