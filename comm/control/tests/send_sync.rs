//! Which public types are `Send` and `Sync`.

use hsdp_control::{
    Bootstrap, ControlError, Deadlines, Ends, Job, Joined, Loss, Member, Membership, Options,
    Secret, Server, State, Status, Subject, Terms,
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
    everywhere::<Ends>();
}
