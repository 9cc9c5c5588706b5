//! Which public types are `Send` and `Sync`.

use hsdp_control::{
    ArgumentError, Bootstrap, ConnectionError, ControlError, Deadlines, Ends, Job, JoinError,
    Joined, Loss, Member, Membership, Options, RendezvousError, Secret, Server, ServerError, State,
    Status, Subject, Terms,
};

fn everywhere<T: Send + Sync + 'static>() {}

#[test]
fn the_table() {
    everywhere::<Server>();
    everywhere::<Subject>();
    everywhere::<Options>();
    everywhere::<Membership>();
    everywhere::<Bootstrap>();
    everywhere::<Joined>();
    everywhere::<Job>();
    everywhere::<Terms>();
    everywhere::<Member>();
    everywhere::<Secret>();
    everywhere::<Deadlines>();
    everywhere::<Status>();
    everywhere::<State>();
    everywhere::<Loss>();
    everywhere::<ControlError>();
    everywhere::<RendezvousError>();
    everywhere::<JoinError>();
    everywhere::<ConnectionError>();
    everywhere::<ServerError>();
    everywhere::<ArgumentError>();
    everywhere::<Ends>();
}
