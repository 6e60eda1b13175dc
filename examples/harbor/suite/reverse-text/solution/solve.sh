#!/bin/bash
rev message.txt > reversed.txt
