//! Updates of parameters.

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, DeviceUpdate, PieceOfStep, Stream};
use hsdp_kernels::{
    AdamWStep, FusedUpdate, HostBuffer, MomentumKind, SgdStep, adamw, sgd, update_in_blocks,
};
use hsdp_sharding::DType;

use crate::case::{Case, Failure};
use crate::source::{Source, host, numbers};

/// By what gradients are divided: no power of two.
const DIVISOR: f64 = 3.0;

/// Where the numbers of gradients begin.
const GRADIENT: usize = 1000;

const ADAMW: AdamWStep = AdamWStep {
    learning_rate: 1e-3,
    beta1: 0.9,
    beta2: 0.999,
    epsilon: 1e-8,
    weight_decay: 0.1,
    step: 1,
    clip: 0.5,
};

const SGD: SgdStep = SgdStep {
    learning_rate: 1e-3,
    momentum: 0.9,
    kind: MomentumKind::Classic,
    weight_decay: 0.1,
    clip: 0.5,
};

/// Which optimizer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    /// [`Stream::adamw`].
    AdamW,
    /// [`Stream::sgd`], with momentum.
    Sgd,
}

impl Rule {
    /// Buffers of state.
    fn states(self) -> usize {
        match self {
            Self::AdamW => 2,
            Self::Sgd => 1,
        }
    }
}

/// An update of all elements, in pieces as long as each other.
pub(crate) struct Update {
    rule: Rule,
    pieces: Vec<PieceOfStep>,
    parameters: DeviceBuffer,
    rounded: Option<DeviceBuffer>,
    gradient: DeviceBuffer,
    /// Two, of which an optimizer with one state leaves the second empty.
    states: [DeviceBuffer; 2],
}

impl Update {
    /// Makes an update of about `len` elements in `count` pieces, with a copy in the dtype `cast`.
    pub(crate) fn new(
        source: &Source<'_>,
        rule: Rule,
        len: usize,
        count: usize,
        cast: Option<DType>,
    ) -> Result<Self, CudaError> {
        let each = (len / count / 32).max(1) * 32;
        let len = each * count;
        let piece = |index| {
            let state = index * each;
            PieceOfStep { range: state..state + each, state, step: 1 }
        };
        let second = if rule.states() == 2 { len } else { 0 };
        Ok(Self {
            rule,
            pieces: (0..count).map(piece).collect(),
            parameters: source.device(DType::F32, 0, len)?,
            rounded: cast.map(|dtype| source.empty(dtype, len)).transpose()?,
            gradient: source.device(DType::F32, GRADIENT, len)?,
            states: [source.zeros(len)?, source.zeros(second)?],
        })
    }

    /// Returns the results of the twin: parameters, their rounded copies, and states.
    fn expected(&self) -> (Vec<f32>, Option<HostBuffer>, [Vec<f32>; 2]) {
        let len = self.parameters.len();
        let gradient = numbers(GRADIENT, len);
        let mut parameters = numbers(0, len);
        let mut rounded = self.rounded.as_ref().map(|it| host(it.dtype(), 0, len));
        let mut states = [vec![0.0; len], vec![0.0; self.states[1].len()]];
        let [first, second] = &mut states;
        let fused = FusedUpdate {
            parameters: &mut parameters,
            rounded: rounded.as_mut().map(HostBuffer::values_mut),
            gradient: &gradient,
            divisor: DIVISOR,
        };
        update_in_blocks(fused, |range, parameters, gradient| match self.rule {
            Rule::AdamW => {
                let second = &mut second[range.clone()];
                adamw(&ADAMW, parameters, gradient, &mut first[range], second);
            }
            Rule::Sgd => sgd(&SGD, parameters, gradient, Some(&mut first[range])),
        });
        (parameters, rounded, states)
    }
}

impl Case for Update {
    fn bytes(&self) -> usize {
        // Parameters and states are read and written, the gradient is read.
        let of_f32 = 2 * (1 + self.rule.states()) + 1;
        let rounded = self.rounded.as_ref().map_or(0, |it| it.dtype().size_bytes());
        self.parameters.len() * (of_f32 * size_of::<f32>() + rounded)
    }

    fn issue(&mut self, stream: &Stream, launches: u32) -> Result<(), CudaError> {
        (0..launches).try_for_each(|_| {
            let update = DeviceUpdate {
                parameters: &mut self.parameters,
                first: 0,
                gradient_first: 0,
                rounded: self.rounded.as_mut(),
                gradient: &self.gradient,
                divisor: DIVISOR,
            };
            let [first, second] = &mut self.states;
            match self.rule {
                Rule::AdamW => stream.adamw(update, &self.pieces, &ADAMW, first, second),
                Rule::Sgd => stream.sgd(update, &self.pieces, &SGD, Some(first)),
            }
        })
    }

    fn check(&self, source: &Source<'_>) -> Result<(), Failure> {
        let (parameters, rounded, [first, second]) = self.expected();
        source.compare(&self.parameters, &parameters.into(), "the parameters")?;
        source.compare(&self.states[0], &first.into(), "the first state")?;
        source.compare(&self.states[1], &second.into(), "the second state")?;
        self.rounded.iter().zip(&rounded).try_for_each(|(found, expected)| {
            source.compare(found, expected, "what the parameters are rounded to")
        })
    }
}
