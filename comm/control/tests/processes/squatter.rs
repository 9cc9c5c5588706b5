//! A process that has the coordinator's port and is not a coordinator.

use std::env;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread;

use crate::member::{say, wait_to_be_told};

/// Holds the port until the test ends it, or ends itself.
pub(crate) fn run() -> Result<(), String> {
    let variable = |name| env::var(name).expect("it is set");
    let address = format!("{}:{}", variable("MASTER_ADDR"), variable("MASTER_PORT"));
    let listener = TcpListener::bind(address).expect("it is free");
    let kind = variable("HSDP_TEST_SQUATTER");
    say("listening");
    thread::spawn(move || {
        let mut held = Vec::new();
        for stream in listener.incoming().map_while(Result::ok) {
            match kind.as_str() {
                "says nothing" => held.push(stream),
                "speaks HTTP" => speak_http(stream),
                _ => drop(stream),
            }
        }
    });
    wait_to_be_told();
    Ok(())
}

fn speak_http(mut stream: TcpStream) {
    // An error concerns only the other end.
    let _ = stream.read(&mut [0; 1024]);
    let _ = stream
        .write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
}
