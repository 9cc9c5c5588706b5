//! The states of a value along the axes of the mesh.

use super::Dist;
use crate::autograd::dist::along::{Along, made};
use crate::autograd::dist::axis::{OnBoth, OnReplicate, OnShard};
use crate::autograd::dist::carrier::Carrier;
use crate::autograd::dist::state::State;
use crate::autograd::dist::tagged::Tagged;

impl<C: Carrier, R: State, S: State> made::Made<C> for Dist<C, R, S> {
    fn made(tagged: Tagged<C>) -> Self {
        Self::new(tagged)
    }
}

impl<C: Carrier, R: State, S: State> Along<OnReplicate> for Dist<C, R, S> {
    type Carrier = C;
    type State = R;
    type Beside = S;
    type With<Q: State> = Dist<C, Q, S>;
}

impl<C: Carrier, R: State, S: State> Along<OnShard> for Dist<C, R, S> {
    type Carrier = C;
    type State = S;
    type Beside = R;
    type With<Q: State> = Dist<C, R, Q>;
}

impl<C: Carrier, Q: State> Along<OnBoth> for Dist<C, Q, Q> {
    type Carrier = C;
    type State = Q;
    type Beside = Q;
    type With<P: State> = Dist<C, P, P>;
}
