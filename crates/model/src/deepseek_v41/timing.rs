//! What a measurement needs to see of a round: the layers without the head, and what they read.

use tf_device::Queue;
use tf_device::gpu::rounds::{Counts, Giving, RoundTimes};
use tf_engine::model::{ForwardError, RoundPlan};

use super::model::DeepseekV41;

impl DeepseekV41 {
    /// Runs all layers over the rows of `plan` and draws nothing. Does not wait: see [`DeepseekV41::finish`].
    ///
    /// # Errors
    /// [`ForwardError::Failed`] as for any round.
    pub fn compute(&mut self, plan: &RoundPlan) -> Result<(), ForwardError> {
        let given = self.run(plan).and_then(|()| Ok(self.queue.submit()?));
        given.map_err(|error| ForwardError::Failed(error.to_string()))
    }

    /// When the launches of a round start on a GPU that can collect them. Changes no bit.
    ///
    /// # Errors
    /// [`ForwardError::Failed`] when the device fails.
    pub fn give_rounds(&mut self, giving: Giving) -> Result<(), ForwardError> {
        match &self.queue {
            Queue::Cpu(_) => Ok(()),
            Queue::Gpu(queue) => queue.driver().give(giving).map_err(|error| ForwardError::Failed(error.to_string())),
        }
    }

    /// As [`DeepseekV41::compute`], and says where the time of the layers goes; `None` where rounds are not collected. Rounds
    /// have to start whole. The slots of `plan` hold anything afterwards.
    ///
    /// # Errors
    /// As [`DeepseekV41::compute`].
    pub fn time_round(&mut self, plan: &RoundPlan, repetitions: u32) -> Result<Option<RoundTimes>, ForwardError> {
        self.run(plan).map_err(|error| ForwardError::Failed(error.to_string()))?;
        match &self.queue {
            Queue::Cpu(_) => Ok(None),
            Queue::Gpu(queue) => {
                queue.driver().time_round(repetitions).map_err(|error| ForwardError::Failed(error.to_string()))
            }
        }
    }

    /// What became of collected launches so far; all zero where none are.
    pub fn round_counts(&self) -> Counts {
        match &self.queue {
            Queue::Cpu(_) => Counts::default(),
            Queue::Gpu(queue) => queue.driver().round_counts(),
        }
    }

    /// Waits until everything given to the device is done.
    ///
    /// # Errors
    /// [`ForwardError::Failed`] when the device fails, now or in an earlier launch.
    pub fn finish(&mut self) -> Result<(), ForwardError> {
        self.queue.finish().map_err(|error| ForwardError::Failed(error.to_string()))
    }

    /// How many different experts the last layer's first `rows` rows of the last round chose.
    ///
    /// # Errors
    /// [`ForwardError::Failed`] when the device fails.
    pub fn experts_chosen(&mut self, rows: usize) -> Result<usize, ForwardError> {
        let mut chosen = vec![0_u32; rows * self.shape.num_experts_per_tok];
        let read = self.queue.read(&self.scratch.chosen, 0, &mut chosen);
        read.map_err(|error| ForwardError::Failed(error.to_string()))?;
        chosen.sort_unstable();
        chosen.dedup();
        Ok(chosen.len())
    }

    /// Bytes of weights that a round reads: all that is dense in the layers, and one routed expert of a layer.
    pub fn read_bytes(&self) -> ReadBytes {
        let dense = self.weights.layers.iter().map(|layer| layer.dense_bytes() + layer.experts.shared().bytes() as u64);
        let layer = self.weights.layers.first().map(|layer| &layer.experts);
        let routed = layer.map_or(0, |experts| (experts.bytes() - experts.shared().bytes()) as u64);
        ReadBytes {
            dense: dense.sum(),
            expert: routed / self.shape.n_routed_experts as u64,
            head: self.weights.head.bytes() as u64,
        }
    }
}

/// Bytes that a round reads once, however many rows it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadBytes {
    /// All layers: attention, shared experts, routers, indexers, hyper-connections, norms.
    pub dense: u64,
    /// One routed expert of one layer.
    pub expert: u64,
    pub head: u64,
}
